"""What the workers report, as metrics with the labels ``role`` and ``replica``."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from router.pool.pool import ReplicaPool
from router.pool.replica import Replica
from router.report.metric_rows import Labels, MetricFamily, counter, gauge

_GAUGES: tuple[tuple[str, str, Callable[[Replica], float]], ...] = (
    ("baton:kv_cache_usage_ratio", "Share of the KV blocks in use.", lambda item: item.load.kv_usage),
    ("baton:kv_cache_blocks", "KV blocks.", lambda item: item.load.num_blocks),
    ("baton:num_requests_running", "Requests that compute.", lambda item: item.load.num_running),
    ("baton:num_requests_waiting", "Requests that wait.", lambda item: item.load.num_waiting),
    ("baton:num_requests_loading", "Requests whose KV is on its way.", lambda item: item.load.num_loading),
    ("baton:num_leased_blocks", "KV blocks pinned for a reader.", lambda item: item.load.num_leased_blocks),
    ("baton:queued_prefill_tokens", "Prompt tokens that wait.", lambda item: item.load.queued_prefill_tokens),
    ("baton:replica_up", "1 when the replica takes requests.", lambda item: float(item.takes_requests)),
)

_Named = tuple[str, str, Labels]

_NAMES: dict[str, _Named] = {
    "prefix_queried_tokens": ("prefix_cache_queried_tokens", "Prompt tokens looked up in the prefix cache.", ()),
    "prefix_hit_tokens": (
        "prefix_cache_hit_tokens",
        "Prompt tokens whose KV was there already, or came from another engine.",
        (("source", "local"),),
    ),
    "remote_hit_tokens": ("prefix_cache_hit_tokens", "", (("source", "remote"),)),
    "num_preemptions": ("preemptions", "Requests that lost their KV to others.", ()),
    "num_nan_logits": ("nan_logits", "Sampled tokens whose logits held a NaN.", ()),
    "recomputed_tokens": ("recomputed_tokens", "Tokens whose KV was lost and computed again.", ()),
    "failed_blocks": ("failed_blocks", "KV blocks that were wanted and not fetched.", ()),
    "num_evicted_blocks": ("evicted_blocks", "Cached KV blocks that made room for others.", ()),
    "num_steps": ("engine_steps", "Steps of the engine.", ()),
    "num_waited_steps": (
        "engine_waited_steps",
        "Steps whose sampling waited for the tokens of the step before.",
        (),
    ),
    "step_s": ("engine_step_seconds", "Time in steps of the engine.", ()),
    "num_integrity_failures": ("integrity_failures", "Times that an idle engine's blocks did not add up.", ()),
    "num_transfers": ("kv_transfers", "Loads of KV that ended, well or not.", ()),
    "num_bytes": ("kv_transfer_bytes", "Bytes of KV read from other engines.", ()),
    "num_blocks": ("kv_transfer_blocks", "Blocks of KV read from other engines.", ()),
    "transfer_s": ("kv_transfer_seconds", "Time from the beginning to the end of each load.", ()),
    "num_failed_loads": ("kv_transfer_failures", "Loads of KV that failed.", ()),
    "num_corrupt_blocks": ("kv_transfer_corrupt_blocks", "Blocks whose checksum was wrong.", ()),
    "num_leases_granted": ("leases_granted", "Leases on KV blocks given.", ()),
    "num_leases_done": ("leases_done", "Leases ended by their reader.", ()),
    "num_leases_expired": ("leases_expired", "Leases that ran out.", ()),
    "num_leases_aborted": ("leases_aborted", "Leases ended because nobody wanted the KV any more.", ()),
}
"""The counters that dashboards use. Others keep the name that the worker gives them, after ``baton:worker_``."""


def worker_families(pools: Iterable[ReplicaPool]) -> list[MetricFamily]:
    """Gauges of every replica, and counters of those too that are gone: the rows of the last ones stay."""
    pools = tuple(pools)
    families = []
    for name, text, read in _GAUGES:
        values = {
            _labels(pool.role, replica.replica_id): float(read(replica)) for pool in pools for replica in pool.replicas
        }
        families.append(gauge(name, text, values))
    counted: dict[str, dict[Labels, float]] = {}
    for pool in pools:
        for replica_id, counters in pool.counters.by_replica().items():
            for key, value in counters.items():
                _, _, labels = _named(key)
                counted.setdefault(key, {})[_labels(pool.role, replica_id) + labels] = value
    for key, known in _NAMES.items():
        families.append(counter(f"baton:{known[0]}", known[1], counted.pop(key, {})))
    families.extend(counter(f"baton:{_named(key)[0]}", _named(key)[1], counted[key]) for key in sorted(counted))
    return families


def _named(key: str) -> _Named:
    return _NAMES.get(key) or (f"worker_{key}", f"The workers' {key}.", ())


def _labels(role: str, replica_id: str) -> Labels:
    return (("role", role), ("replica", replica_id))
