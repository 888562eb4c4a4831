"""The JSON of /status: current answers of every replica, and the totals."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from engine.contract.messages import LoadReport
from engine.contract.stats import GAUGES, WORKER_COUNTERS
from router.pool.replica import Replica
from router.pool.role_view import RoleReplicas
from router.pool.workers import ReplicaStatus, WorkerError
from router.report.counters import ROUTER_COUNTERS, RouterCounters
from router.report.router_report import KnownRouter

_ROUTER_TOTALS = {told.total: name for name, told in ROUTER_COUNTERS.items() if told.total}

WORKER_TOTALS = {told.total: name for name, told in WORKER_COUNTERS.items() if told.total}
"""The names of totals, and the workers' counters that they sum."""


async def cluster_status(
    *,
    model: str,
    routers: Sequence[KnownRouter],
    forgotten: RouterCounters,
    pools: Iterable[RoleReplicas],
    timeout_s: float,
) -> dict[str, object]:
    """Ask all replicas concurrently, each for at most ``timeout_s``. The first of ``routers`` is the one that answers.

    The totals cover all routers and workers, including departed ones, and earlier routers, whose sums are
    ``forgotten``.
    """
    rows: dict[str, list[dict[str, object]]] = {}
    sums: Counter[str] = Counter()
    for pool in pools:
        answers = await asyncio.gather(*(_ask(pool, replica, timeout_s) for replica in by_name(pool)))
        rows[pool.role] = answers
        sums.update(pool.counters.total())
    router_rows = [_router_row(router) for router in routers]
    return {
        "model": model,
        "router": router_rows[0],
        "routers": router_rows,
        "pools": rows,
        "totals": _totals(sums, [*(router.report.counters for router in routers), forgotten]),
    }


def by_name(pool: RoleReplicas) -> list[Replica]:
    """The replicas of a pool, sorted by name."""
    return sorted(pool.replicas, key=lambda replica: replica.replica_id)


def _router_row(router: KnownRouter) -> dict[str, object]:
    report = router.report
    is_gone = router.state == "departed"
    return {
        "router_id": report.router_id,
        "node_ip": report.node_ip,
        "pid": report.pid,
        "state": router.state,
        "created": report.created_s,
        "server_load": 0 if is_gone else report.num_alive,
        "num_waiting": 0 if is_gone else report.num_waiting,
        **{name: getattr(report.counters, key) for name, key in _ROUTER_TOTALS.items()},
    }


def _totals(sums: Mapping[str, float], counters: Sequence[RouterCounters]) -> dict[str, object]:
    totals: dict[str, object] = {
        name: sum(getattr(item, key) for item in counters) for name, key in _ROUTER_TOTALS.items()
    }
    totals.update({name: _whole(sums.get(key, 0)) for name, key in WORKER_TOTALS.items()})
    totals["counters"] = {name: _whole(value) for name, value in sorted(sums.items())}
    return totals


async def _ask(pool: RoleReplicas, replica: Replica, timeout_s: float) -> dict[str, object]:
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
        "leaning": replica.leaning if status is None else load.leaning or replica.role,
        "keeps_to": replica.keeps_to,
        "unhealthy": load.unhealthy,
        "report_age_s": round(age_s, 3),
        "kv_usage": round(load.kv_usage, 6),
        **{name: getattr(load, name) for name in GAUGES},
        "step_time": asdict(load.step_time),
        "engine_id": info.engine_id if info else None,
        "incarnation": info.incarnation if info else None,
        "block_size": info.block_size if info else None,
        "block_bytes": info.block_bytes if info else None,
        "max_model_len": info.max_model_len if info else None,
        "device": info.device if info else None,
        "dtype": info.dtype if info else None,
        "transport": info.transport if info else None,
        "num_threads": info.num_threads if info else None,
        "thread_speedup": round(info.thread_speedup, 2) if info else None,
        "borrows_cores": info.borrows_cores if info else None,
        "num_host_cores": info.num_host_cores if info else None,
        "shared_gpu": info.shared_gpu if info else None,
        "counters": {name: _whole(value) for name, value in sorted(load.counters.items())},
    }


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else round(value, 6)
