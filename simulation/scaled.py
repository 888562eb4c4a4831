"""A cluster in virtual time whose pools follow the promises: the real scaling policy, and workers with a start time."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from router.report.arrivals import ArrivalSample
from router.report.router_report import ScalingNote
from router.scaling.control import ScalingControl
from router.scaling_rules import ScalingRules
from simulation.cluster import VirtualCluster, choices_of, virtual_cluster
from simulation.layout import Layout
from simulation.loads import Arrival
from simulation.outcome import Outcome
from simulation.virtual_loop import run_virtually
from simulation.worker import VirtualWorker

ROUTER_ID = "router-0"


@dataclass(slots=True, kw_only=True)
class _Lifetime:
    """The time for which a worker costs: from the order to start it until it is gone."""

    ordered_s: float
    gone_s: float | None = None


class VirtualSizes:
    """Implements ``ScalingOrders`` and ``ScalingBoard``. A worker is ready ``start_s`` after it was ordered. If there
    are too many, those with the fewest requests are drained.
    """

    def __init__(self, cluster: VirtualCluster, *, start_s: float) -> None:
        self.notes: list[ScalingNote] = []
        self._cluster = cluster
        self._loop = asyncio.get_running_loop()
        self._start_s = start_s
        self._serving: defaultdict[str, list[VirtualWorker]] = defaultdict(list)
        self._starting: defaultdict[str, list[tuple[asyncio.TimerHandle, _Lifetime]]] = defaultdict(list)
        self._lifetimes: dict[str, _Lifetime] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._ended: list[_Lifetime] = []
        for worker in cluster.workers.values():
            self._serving[worker.spec.role].append(worker)
            self._lifetimes[worker.spec.name] = _Lifetime(ordered_s=self._loop.time())

    def worker_seconds(self, since_s: float, until_s: float) -> float:
        """Seconds of all workers in a span of time, including workers that start."""
        starting = [life for of_role in self._starting.values() for _, life in of_role]
        total_s = 0.0
        for life in (*self._lifetimes.values(), *starting, *self._ended):
            end_s = until_s if life.gone_s is None else min(life.gone_s, until_s)
            total_s += max(end_s - max(life.ordered_s, since_s), 0.0)
        return total_s

    async def want(self, role: str, number: int) -> None:
        """Set the number of workers of a role."""
        serving, starting = self._serving[role], self._starting[role]
        while len(serving) + len(starting) < number:
            life = _Lifetime(ordered_s=self._loop.time())
            timer = self._loop.call_later(self._start_s, self._begin, role)
            starting.append((timer, life))
        while starting and len(serving) + len(starting) > number:
            timer, life = starting.pop()
            timer.cancel()
            life.gone_s = self._loop.time()
            self._ended.append(life)
        while len(serving) > number:
            self._end(min(serving, key=lambda item: (item.load.num_running + item.load.num_waiting, item.spec.name)))

    async def close(self) -> None:
        """Start no more workers, and wait for draining ones to end."""
        for timer, _ in (item for of_role in self._starting.values() for item in of_role):
            timer.cancel()
        await asyncio.gather(*self._leaving)

    def live_router_ids(self) -> Sequence[str]:
        """One of the routers decides."""
        return (ROUTER_ID,)

    def arrivals(self) -> Sequence[ArrivalSample]:
        """The arrivals at all routers. Routers know of each other's arrivals at once."""
        found = [router.orchestrator.arrivals for router in self._cluster.routers]
        return [arrivals.sample() for arrivals in found if arrivals is not None]

    def note_scaling(self, note: ScalingNote) -> None:
        """Record a change."""
        self.notes.append(note)

    def last_scaling(self, role: str) -> ScalingNote | None:
        """The last change of a pool."""
        return next((note for note in reversed(self.notes) if note.role == role), None)

    def _begin(self, role: str) -> None:
        _, life = self._starting[role].pop(0)
        worker = self._cluster.add_worker(role)
        self._lifetimes[worker.spec.name] = life
        self._serving[role].append(worker)

    def _end(self, worker: VirtualWorker) -> None:
        self._serving[worker.spec.role].remove(worker)
        task = asyncio.create_task(self._leave(worker))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _leave(self, worker: VirtualWorker) -> None:
        name = worker.spec.name
        await self._cluster.pools[worker.spec.role].drain(name)
        self._lifetimes[name].gone_s = self._loop.time()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledRun:
    """The result of a load on a layout whose pools follow the promises. ``worker_s``: seconds of all workers, from the
    load's start to its last token. ``notes`` are the changes, at virtual times. ``took_s``: real seconds.
    """

    outcomes: Sequence[Outcome]
    worker_s: float
    seconds: float
    started_s: float
    notes: Sequence[ScalingNote]
    took_s: float


def simulate_scaled(
    layout: Layout,
    arrivals: Sequence[Arrival],
    rules: ScalingRules,
    *,
    start_s: float,
    seed: int = 0,
    warm_up: Sequence[Arrival] = (),
) -> ScaledRun:
    """Serve a load, starting with the workers of a layout. Before, these learn from ``warm_up`` how long steps take.

    The same arguments give exactly the same run, to the last digit.
    """
    layout = replace(layout, settings=replace(layout.settings, scaling=rules, promise=layout.promise))

    async def serve() -> ScaledRun:
        random.seed(seed)
        began_s, loop = time.perf_counter(), asyncio.get_running_loop()
        async with virtual_cluster(layout, seed=seed) as cluster:
            await cluster.send(warm_up)
            started_s = loop.time()
            sizes = VirtualSizes(cluster, start_s=start_s)
            control = _control(cluster, sizes, layout)
            control.start()
            outcomes = await cluster.send(arrivals)
            ended_s = loop.time()
            await control.close()
            await sizes.close()
            await cluster.rest()
        return ScaledRun(
            outcomes=outcomes,
            worker_s=sizes.worker_seconds(started_s, ended_s),
            seconds=ended_s - started_s,
            started_s=started_s,
            notes=sizes.notes,
            took_s=time.perf_counter() - began_s,
        )

    with choices_of(layout, arrivals):
        return run_virtually(serve())


def _control(cluster: VirtualCluster, sizes: VirtualSizes, layout: Layout) -> ScalingControl:
    router, clock = cluster.routers[0], asyncio.get_running_loop().time
    control = ScalingControl(
        router.role_views(),
        view=sizes,
        own_id=ROUTER_ID,
        settings=layout.settings,
        counters=router.counters,
        clock=clock,
        wall_clock=clock,
    )
    control.orders = sizes
    return control


def sizes_over_time(run: ScaledRun, first: Mapping[str, int]) -> list[tuple[float, int]]:
    """The total number of wanted workers over time: (second of the load, number) for each change."""
    wanted, found = dict(first), [(0.0, sum(first.values()))]
    for note in run.notes:
        wanted[note.role] = note.wanted
        found.append((note.changed_at_s - run.started_s, sum(wanted.values())))
    return found
