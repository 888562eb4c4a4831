"""What must hold in a random world: how requests end, and that nothing is left of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

from router.pool.pool import ReplicaPool
from router.pool.replica import Replica
from router.wire.worker_link import WorkerLink
from simulation.cluster import VirtualCluster, VirtualRouter
from simulation.worker import VirtualWorker


def unrest(cluster: VirtualCluster) -> Sequence[str]:
    """What is still held or counted for any request, at workers and at routers; or what a router sees wrongly."""
    workers = [worker for worker in cluster.workers.values() if not worker.is_gone]
    found = [f"{worker.spec.name}: {what}" for worker in workers for what in _left_at_worker(worker)]
    for router in cluster.routers:
        found += [f"{router.router_id}: {what}" for what in _left_at_router(router, workers)]
    return found


def holders(cluster: VirtualCluster, request_id: str) -> Sequence[str]:
    """The workers that still run a request, or keep its KV under a lease."""
    return [
        name
        for name, worker in cluster.workers.items()
        if request_id in worker.core.scheduler._live_requests.live
        or worker.transfers.leases._by_request.get(request_id)
    ]


def _left_at_worker(worker: VirtualWorker) -> Iterator[str]:
    scheduler, transfers, load = worker.core.scheduler, worker.transfers, worker.load
    scheduler.check_integrity()
    if load.num_free_blocks != load.num_blocks or not load.is_empty:
        yield f"its load is {load}"
    counts = transfers.leases.counts()
    if counts.num_granted != counts.num_done + counts.num_aborted + counts.num_expired:
        yield f"its leases are {counts}"
    for name in ("_loading", "_cancelled", "_streams", "_by_request"):
        if held := getattr(transfers, name):
            yield f"its transfers have {name}: {held}"
    if transfers._renewals.awaited:
        yield f"it waits for the leases {transfers._renewals.awaited}"
    if requests := {name: ids for name, ids in worker._requests_of.items() if ids}:
        yield f"it remembers the requests {requests}"


def _left_at_router(router: VirtualRouter, workers: Sequence[VirtualWorker]) -> Iterator[str]:
    orchestrator = router.orchestrator
    for name, number in {
        "alive": orchestrator.num_alive,
        "waiting": orchestrator.num_waiting,
        "places": len(orchestrator._admission._places),
        "streams to balance": len(router.streams.all()),
        "mailboxes": orchestrator._pacer.num_streams,
    }.items():
        if number:
            yield f"{number} {name}"
    counters = router.counters
    ended = counters.num_finished + counters.num_failed + counters.num_cancelled + counters.num_invalid
    if counters.num_requests != ended:
        yield f"{counters.num_requests} requests were accepted, and {ended} ended"
    for link in dict.fromkeys(router.links.values()):
        yield from _left_at_link(link)
    for role, link in router.links.items():
        of_role = [worker for worker in workers if worker.spec.role == role]
        for worker in of_role:
            yield from _left_at_replica(link.pool, worker)
    known = {replica.replica_id for link in router.links.values() for replica in link.pool.replicas}
    if gone := known - {worker.spec.name for worker in workers}:
        yield f"it knows {gone}, which are gone"


def _left_at_link(link: WorkerLink) -> Iterator[str]:
    notices, aborts, submissions = link.notices, link.aborts, link._submissions
    gc.collect(0)
    for name, held in {
        "notices": notices._notices,
        "tasks of notices": notices._tasks,
        "aborts": aborts._waiting,
        "tasks of aborts": aborts._tasks,
        "submissions": submissions._tasks,
        "lanes": submissions._lanes,
        "sinks": [sink for stream in link.streams._streams.values() for sink in stream.sinks],
    }.items():
        if held:
            yield f"{name}: {held}"
    if (num_tasks := len(link.streams._tasks)) != (num_streams := len(link.streams._streams)):
        yield f"{num_tasks} tasks read {num_streams} streams"


def _left_at_replica(pool: ReplicaPool, worker: VirtualWorker) -> Iterator[str]:
    name = worker.spec.name
    replica = pool.get(name)
    if replica is None:
        yield f"it does not know {name}"
        return
    if not pool.is_usable(replica) or not replica.has_stream:
        yield f"{name} is not in service"
    if reserved := _reserved(replica):
        yield f"{name} has reservations: {reserved}"
    if not replica.load.is_empty or replica.load.num_free_blocks != replica.load.num_blocks:
        yield f"{name} has a load in its eyes: {replica.load}"
    if replica.leaning != worker.leaning:
        yield f"{name} leans to {worker.leaning}, not to {replica.leaning}"
    if pool.mirror is not None and (mirrored := pool.mirror._replicas.get(name)) is not None:
        cached = len(worker.core.cache_snapshot().stored) // 8
        if len(mirrored.keys) != cached:
            yield f"{name} has {cached} blocks cached, and {len(mirrored.keys)} are known"


def _reserved(replica: Replica) -> Sequence[int]:
    reserved = (
        replica.reserved_blocks,
        replica.reserved_tokens,
        replica.num_reserved_rows,
        replica.num_reserved,
        len(replica.on_report),
    )
    return reserved if any(reserved) else ()
