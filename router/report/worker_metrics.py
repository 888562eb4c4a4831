"""The workers' reports, as metrics with the labels ``role`` and ``replica``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter

from engine.contract.stats import GAUGES, WORKER_COUNTERS
from kv_transfer.stats import Counted
from router.pool.replica import Replica
from router.pool.role_view import RoleReplicas
from router.report.metric_rows import Labels, MetricFamily, counter, gauge

_GAUGES: tuple[tuple[str, str, Callable[[Replica], float]], ...] = (
    ("kv_cache_usage_ratio", "Share of the KV blocks in use.", lambda item: item.load.kv_usage),
    *((told.metric, told.text, attrgetter(f"load.{name}")) for name, told in GAUGES.items() if told.metric),
    ("step_time_error", "Relative error of predicted step times.", attrgetter("load.step_time.error")),
    ("replica_up", "1 if the worker takes requests.", lambda item: float(item.takes_requests)),
)


def worker_families(pools: Iterable[RoleReplicas]) -> list[MetricFamily]:
    """Gauges of every replica, and counters, also of departed replicas: the rows of the last of these stay."""
    pools = tuple(pools)
    families = []
    for name, text, read in _GAUGES:
        values = {
            _labels(pool.role, replica.replica_id): float(read(replica)) for pool in pools for replica in pool.replicas
        }
        families.append(gauge(f"baton:{name}", text, values))
    values_of: dict[str, dict[Labels, float]] = {name: {} for name, told in WORKER_COUNTERS.items() if told.metric}
    for pool in pools:
        for replica_id, counters in pool.counters.by_replica().items():
            for name, value in counters.items():
                labels = _labels(pool.role, replica_id) + _told(name).labels
                values_of.setdefault(name, {})[labels] = value
    for name, values in values_of.items():
        told = _told(name)
        families.append(counter(f"baton:{told.metric}", told.text, values))
    return families


def _told(name: str) -> Counted:
    """The description of a counter; a default for one that only workers of another version have."""
    told = WORKER_COUNTERS.get(name)
    return told if told is not None and told.metric else Counted(metric=f"worker_{name}", text=f"The workers' {name}.")


def _labels(role: str, replica_id: str) -> Labels:
    return (("role", role), ("replica", replica_id))
