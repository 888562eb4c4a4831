"""Builds the state of the whole cluster from data that this router already has, without any calls."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

from kv_transfer.stats import counted_tiers
from router.placement.reason import Reason
from router.pool.replica import Replica
from router.pool.role_view import RoleReplicas
from router.report.counters import RouterCounters
from router.report.router_report import LeaningNote, ScalingNote
from router.settings import RouterSettings

State: TypeAlias = dict[str, Any]
"""A JSON object without null, so that a merge patch (RFC 7396) can express all changes (docs/live-page.md)."""

_TOTALS: Final = {
    "requests": "num_requests",
    "finished": "num_finished",
    "failed": "num_failed",
    "cancelled": "num_cancelled",
    "refused": "num_refused",
    "tokens": "num_generated_tokens",
    "prompt_tokens": "num_prompt_tokens",
    "prefill_retries": "num_prefill_retries",
    "migrations": "num_migrations",
    "local_prefills": "num_local_prefills",
    "drain_moves": "num_drain_moves",
    "gap_moves": "num_gap_moves",
    "kv_moves": "num_kv_moves",
    "queue_moves": "num_queue_moves",
    "ordered_moves": "num_ordered_moves",
    "failed_moves": "num_failed_moves",
    "leaning_changes": "num_leaning_changes",
}
_WORK: Final = {
    "failed_blocks": "failed_blocks",
    "recomputed_tokens": "recomputed_tokens",
    "preemptions": "num_preemptions",
    "corrupt_blocks": "num_corrupt_blocks",
    "injected_faults": "num_injected_faults",
}
_HAND_OVERS: Final = {
    "count": "num_transfers",
    "bytes": "num_bytes",
    "blocks": "num_blocks",
    "failed": "num_failed_loads",
    "streamed_blocks": "num_streamed_blocks",
    "leases_granted": "num_leases_granted",
    "leases_expired": "num_leases_expired",
}
_TIER_COUNTS: Final = ("hit_blocks", "stored_blocks", "stored_bytes", "loaded_blocks", "loaded_bytes", "evicted_blocks")


class KnownCluster(Protocol):
    """This router's view of all routers (:class:`router.report.cluster_view.ClusterView`)."""

    def router_rows(self) -> Mapping[str, Mapping[str, object]]:
        """All routers by id, from their last reports."""

    def counters(self) -> RouterCounters:
        """Counters of all routers, from their last reports."""

    def last_leaning(self) -> LeaningNote | None:
        """The last change of a leaning that a router made."""

    def num_wanted(self) -> Mapping[str, int]:
        """How many workers each pool should have, by its role."""

    def scaling_notes(self) -> Sequence[ScalingNote]:
        """The last changes of the pools' sizes that routers made."""

    def held_now(self) -> Mapping[str, float]:
        """The workers whose leaning an operator ordered, and until when each order stands."""


class Sampler:
    """Makes states. Rates are differences to the sample before, so all watchers share one sampler."""

    def __init__(
        self,
        pools: Sequence[RoleReplicas],
        view: KnownCluster,
        *,
        model: str,
        router_id: str,
        settings: RouterSettings,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._pools = tuple(pools)
        self._view = view
        self._model = model
        self._router_id = router_id
        self._settings = settings
        self._clock = clock
        self._wall_clock = wall_clock
        self._before: dict[str, Mapping[str, float]] = {}
        self._sampled_at_s = clock()

    def sample(self) -> State:
        """The current state."""
        now_s = self._clock()
        elapsed_s = now_s - self._sampled_at_s
        self._sampled_at_s = now_s
        workers, sums = {}, Counter[str]()
        seen: dict[str, Mapping[str, float]] = {}
        for pool in self._pools:
            sums.update(pool.counters.total())
            for replica in pool.replicas:
                name, counters = replica.replica_id, replica.load.counters
                before = self._before.get(name)
                workers[name] = self._worker(pool, replica, before or counters, elapsed_s)
                seen[name] = counters
        self._before = seen
        routed = self._view.counters()
        return {
            "at_unix_s": round(self._wall_clock(), 3),
            "model": self._model,
            "router": self._router_id,
            "roles": "elastic" if self._settings.is_elastic else "fixed",
            "takes_orders": self._settings.admin_api,
            "allows_faults": self._settings.allows_faults,
            "pools": [pool.role for pool in self._pools],
            "wanted": dict(self._view.num_wanted()),
            "routers": {name: dict(row) for name, row in self._view.router_rows().items()},
            "workers": workers,
            "totals": _totals(routed, sums, workers),
            "choices": {reason.value: getattr(routed, f"num_placed_{reason}") for reason in Reason},
            "hand_overs": {name: _whole(sums.get(key, 0)) for name, key in _HAND_OVERS.items()},
            "tiers": {
                tier: {name: _whole(sums.get(f"num_{tier}_{name}", 0)) for name in _TIER_COUNTS}
                for tier in counted_tiers(sums)
            },
            "leanings": self._leanings(),
            "sizes": {_scaling_key(note): _scaling_row(note) for note in self._view.scaling_notes()},
        }

    def _leanings(self) -> State:
        last = self._view.last_leaning()
        told: State = {"held_until": {name: round(end_s, 3) for name, end_s in self._view.held_now().items()}}
        if last is not None:
            told["last_change"] = {"replica": last.replica_id, "leaning": last.leaning, "reason": last.reason}
        return told

    def _worker(self, pool: RoleReplicas, replica: Replica, before: Mapping[str, float], elapsed_s: float) -> State:
        load, info = replica.load, replica.info
        counters = load.counters

        def rate(name: str) -> float:
            more = counters.get(name, 0.0) - before.get(name, 0.0)
            return max(more, 0.0) / elapsed_s if elapsed_s > 0.0 else 0.0

        generated = rate("num_generated_tokens")
        row: State = {
            "role": replica.role,
            "leaning": replica.leaning,
            "state": self._state(pool, replica),
            "kv": blocks_by_owner(replica),
            "queue": {
                "running": load.num_running,
                "decoding": load.num_decoding,
                "waiting": load.num_waiting,
                "loading": load.num_loading,
                "prompt_tokens": load.queued_prefill_tokens,
            },
            "tokens_per_s": round(generated, 1),
            "prompt_tokens_per_s": round(max(rate("num_scheduled_tokens") - generated, 0.0), 1),
            "kv_bytes_per_s": int(rate("num_bytes")),
            "hand_overs": _whole(counters.get("num_transfers", 0)),
        }
        if replica.keeps_to is not None:
            row["keeps_to"] = replica.keeps_to.value
        if load.unhealthy is not None:
            row["unhealthy"] = load.unhealthy
        if info is not None:
            row.update(node_ip=info.node_ip, pid=info.pid, device=info.device, dtype=info.dtype)
        return row

    def _state(self, pool: RoleReplicas, replica: Replica) -> str:
        if replica.is_left_out:
            return "left_out"
        if replica.info is None:
            return "starting"
        if replica.load.is_draining:
            return "draining"
        return "running" if pool.age_s(replica) < 2 * self._settings.stale_after_s else "silent"


def _scaling_key(note: ScalingNote) -> str:
    """A key that is unique for each change of a pool's size."""
    return f"{note.changed_at_s:.3f}/{note.role}"


def _scaling_row(note: ScalingNote) -> State:
    return {"role": note.role, "wanted": note.wanted, "before": note.before, "reason": note.reason}


def blocks_by_owner(replica: Replica) -> dict[str, int]:
    """A worker's KV blocks by use; they add up to ``total``. ``free``: no content; ``cached``: content, no holder."""
    load = replica.load
    cached = min(load.num_cached_blocks, load.num_free_blocks)
    early = min(load.num_early_blocks, load.num_held_blocks)
    loading = min(load.num_loading_blocks, load.num_held_blocks - early)
    return {
        "total": load.num_blocks,
        "running": load.num_blocks - load.num_free_blocks - load.num_leased_blocks - early - loading,
        "leased": load.num_leased_blocks,
        "loading": loading,
        "early": early,
        "cached": cached,
        "free": load.num_free_blocks - cached,
    }


def _totals(counters: RouterCounters, sums: Mapping[str, float], workers: Mapping[str, State]) -> State:
    told: State = {name: getattr(counters, key) for name, key in _TOTALS.items()}
    told.update({name: _whole(sums.get(key, 0)) for name, key in _WORK.items()})
    for name in ("tokens_per_s", "prompt_tokens_per_s", "kv_bytes_per_s"):
        told[name] = round(sum(row[name] for row in workers.values()), 1)
    return told


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else round(value, 3)
