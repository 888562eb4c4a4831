"""The JSON of /status: every replica asked now, and the totals."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping

from engine.messages import LoadReport
from router.counters import RouterCounters
from router.pool import ReplicaPool
from router.replica import Replica
from router.workers import ReplicaStatus, WorkerError

_TOTALS = {
    "transfers": "num_transfers",
    "transferred_bytes": "num_bytes",
    "transferred_blocks": "num_blocks",
    "failed_loads": "num_failed_loads",
    "failed_blocks": "failed_blocks",
    "recomputed_tokens": "recomputed_tokens",
    "preemptions": "num_preemptions",
    "prefix_queried_tokens": "prefix_queried_tokens",
    "prefix_hit_tokens": "prefix_hit_tokens",
    "remote_hit_tokens": "remote_hit_tokens",
    "leases_granted": "num_leases_granted",
    "leases_expired": "num_leases_expired",
    "leases_aborted": "num_leases_aborted",
}


async def cluster_status(
    *,
    router: Mapping[str, object],
    model: str,
    pools: Iterable[ReplicaPool],
    counters: RouterCounters,
    timeout_s: float,
) -> dict[str, object]:
    """Ask every replica at once, none for longer than ``timeout_s``. ``router`` says who answers."""
    rows: dict[str, list[dict[str, object]]] = {}
    sums: Counter[str] = Counter()
    for pool in pools:
        answers = await asyncio.gather(*(_ask(pool, replica, timeout_s) for replica in by_name(pool)))
        rows[pool.role] = answers
        sums.update(pool.counters.total())
    return {"model": model, "router": dict(router), "pools": rows, "totals": _totals(sums, counters)}


def by_name(pool: ReplicaPool) -> list[Replica]:
    """The replicas of a pool in the order of their names."""
    return sorted(pool.replicas, key=lambda replica: replica.replica_id)


def _totals(sums: Mapping[str, float], counters: RouterCounters) -> dict[str, object]:
    totals: dict[str, object] = {
        "requests": counters.num_requests,
        "finished": counters.num_finished,
        "failed": counters.num_failed,
        "cancelled": counters.num_cancelled,
        "refused": counters.num_refused,
        "tokens": counters.num_generated_tokens,
        "prompt_tokens": counters.num_prompt_tokens,
        "prefill_retries": counters.num_prefill_retries,
        "migrations": counters.num_migrations,
        "drain_moves": counters.num_drain_moves,
    }
    totals.update({name: _whole(sums.get(key, 0)) for name, key in _TOTALS.items()})
    totals["counters"] = {name: _whole(value) for name, value in sorted(sums.items())}
    return totals


async def _ask(pool: ReplicaPool, replica: Replica, timeout_s: float) -> dict[str, object]:
    try:
        async with asyncio.timeout(timeout_s):
            status = await pool.workers.status(replica.replica_id, timeout_s=timeout_s)
    except (WorkerError, TimeoutError):
        return _row(replica, None, replica.load, age_s=pool.age_s(replica))
    load = status.load or replica.load
    if status.info is not None:
        pool.counters.note(replica.replica_id, status.info.incarnation, load.counters)
    return _row(replica, status, load, age_s=0.0)


def _row(replica: Replica, status: ReplicaStatus | None, load: LoadReport, *, age_s: float) -> dict[str, object]:
    info = status.info if status is not None and status.info is not None else replica.info
    return {
        "replica_id": replica.replica_id,
        "node_ip": info.node_ip if info else (status.node_ip if status else None),
        "pid": info.pid if info else (status.pid if status else None),
        "state": status.state if status is not None else "unreachable",
        "is_left_out": replica.is_left_out,
        "is_draining": load.is_draining,
        "report_age_s": round(age_s, 3),
        "kv_usage": round(load.kv_usage, 6),
        "num_blocks": load.num_blocks,
        "num_free_blocks": load.num_free_blocks,
        "num_held_blocks": load.num_held_blocks,
        "num_leased_blocks": load.num_leased_blocks,
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "num_loading": load.num_loading,
        "queued_prefill_tokens": load.queued_prefill_tokens,
        "engine_id": info.engine_id if info else None,
        "incarnation": info.incarnation if info else None,
        "block_size": info.block_size if info else None,
        "block_bytes": info.block_bytes if info else None,
        "max_model_len": info.max_model_len if info else None,
        "device": info.device if info else None,
        "dtype": info.dtype if info else None,
        "counters": {name: _whole(value) for name, value in sorted(load.counters.items())},
    }


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else round(value, 6)
