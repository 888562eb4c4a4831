"""A whole cluster in virtual time: workers, routers, clients."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.role import Work
from router.balance.leaning_control import LeaningControl, goals_of
from router.balance.rebalancer import Rebalancer
from router.balance.streams import LiveStreams
from router.errors import RouterError
from router.placement.machine_code import MACHINE_CODE
from router.pool.role_view import RoleReplicas
from router.pool.workers import WorkerPool
from router.report.counters import RouterCounters
from router.report.router_report import LeaningNote
from router.request.generation import Generation
from router.request.orchestrator import Orchestrator
from router.roles import ROLES
from router.wire.linked_calls import link_for, make_links, role_views
from simulation.faults.network import ConnectedPool, Connections
from simulation.kv.transfers import VirtualFabric
from simulation.layout import Layout, Pool
from simulation.loads import Arrival
from simulation.machine import Machine
from simulation.messages import Messages
from simulation.outcome import Outcome
from simulation.pool import VirtualPool
from simulation.step_runner import Host
from simulation.virtual_loop import run_virtually
from simulation.worker import VirtualWorker
from simulation.worker_spec import WorkerSpec


class VirtualBoard:
    """Implements ``LeaningBoard``: routers know of each other's changes at once, and there are no operator's orders."""

    def __init__(self, num_routers: int) -> None:
        self.router_ids = [f"router-{number}" for number in range(num_routers)]
        self.leaning_notes: list[LeaningNote] = []

    def live_router_ids(self) -> Collection[str]:
        """The ids of all routers."""
        return self.router_ids

    def note_leaning(self, change: LeaningNote) -> None:
        """Remember a change."""
        self.leaning_notes.append(change)

    def hold_leaning(self, replica_id: str, *, until_s: float) -> None:
        """See ``LeaningBoard``."""

    def held_leanings(self) -> Mapping[str, float]:
        """None."""
        return {}


class VirtualRouter:
    """A router with its two pools and its requests, without HTTP and text."""

    def __init__(
        self,
        pools: Mapping[str, VirtualPool],
        layout: Layout,
        *,
        router_id: str,
        board: VirtualBoard,
        connections: Connections | None = None,
    ) -> None:
        """``connections`` None: nothing can happen to the connections to its workers."""
        loop = asyncio.get_running_loop()
        settings = layout.settings
        self.counters = RouterCounters()
        self.router_id = router_id
        self.connections = connections
        reached: Mapping[str, WorkerPool] = pools
        if connections is not None:
            reached = {role: ConnectedPool(pool, connections) for role, pool in pools.items()}
        self.links = make_links(reached, settings=settings, clock=loop.time)
        self._workers = {role: pool.workers for role, pool in pools.items()}
        self._distinct = tuple(dict.fromkeys(self.links.values()))
        self._period_s = min(settings.report_period_s, settings.backoff_min_s) / 2
        self.streams = streams = LiveStreams(clock=loop.time)
        self.orchestrator = Orchestrator(
            *(link_for(self.links, work) for work in Work),
            streams=streams,
            settings=settings,
            counters=self.counters,
            clock=loop.time,
        )
        pool = link_for(self.links, Work.STREAM).pool
        self._rebalancer = Rebalancer(pool, streams, settings=settings, counters=self.counters, clock=loop.time)
        self._leanings = LeaningControl(
            pool,
            pool.workers,
            view=board,
            own_id=router_id,
            settings=settings,
            counters=self.counters,
            goals=goals_of(replace(settings, promise=layout.promise)),
            clock=loop.time,
            wall_clock=loop.time,
        )
        self._refreshing: asyncio.Task[None] | None = None

    def role_views(self) -> Sequence[RoleReplicas]:
        """The workers as this router knows them, by role."""
        return role_views(self.links)

    async def start(self) -> None:
        """Meet the workers, and keep following them."""
        for link in self._distinct:
            await asyncio.gather(*link.pool.refresh())
            link.follow()
        self._refreshing = asyncio.create_task(self._keep_refreshing())
        self._rebalancer.start()
        self._leanings.start()

    async def close(self) -> None:
        """End all requests, and stop."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        await self._leanings.close()
        await self._rebalancer.close()
        await self.orchestrator.close()
        for link in self._distinct:
            await link.pool.close()

    def hear_late_loads(self) -> None:
        """Update the loads of workers that make several decode steps in one, before a request is placed."""
        for role, link in self.links.items():
            for name, worker in self._workers[role].items():
                load = worker.late_load()
                if load is not None and not self._is_disturbed(name):
                    link.pool.note_load(name, load)

    def _is_disturbed(self, name: str) -> bool:
        return self.connections is not None and self.connections.to(name).is_disturbed

    async def _keep_refreshing(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            for link in self._distinct:
                link.pool.refresh()
                link.follow()


class VirtualCluster:
    """The workers and routers of a layout. It must be made and used on a ``VirtualLoop``."""

    def __init__(self, layout: Layout, *, seed: int = 0, network: Callable[[], Connections] | None = None) -> None:
        """``network`` makes the connections of a router, into which faults can be injected; None: they have none."""
        self.layout = layout
        self._network = network
        self.fabric = VirtualFabric(asyncio.get_running_loop())
        self.workers: dict[str, VirtualWorker] = {}
        self._num_hosts, self._num_on_host = 1, 0
        self._host = Host(self._address())
        self.pools = {role: self._pool(role, pool, seed) for role, pool in layout.pools.items()}
        self.board = VirtualBoard(layout.num_routers)
        self.routers = [self._router(router_id, layout) for router_id in self.board.router_ids]
        self._router_numbers = itertools.count(layout.num_routers)
        self._numbers = itertools.count()

    def _router(self, router_id: str, layout: Layout) -> VirtualRouter:
        connections = self._network() if self._network is not None else None
        return VirtualRouter(self.pools, layout, router_id=router_id, board=self.board, connections=connections)

    def _pool(self, role: str, pool: Pool, seed: int) -> VirtualPool:
        self._seed = seed
        workers = [self._worker(role, pool) for _ in range(pool.num_workers)]
        members = {worker.spec.name: worker for worker in workers}
        return VirtualPool(members, pool.machine.router, moves_out=ROLES[role].moves_out)

    def _worker(self, role: str, pool: Pool) -> VirtualWorker:
        number = sum(worker.spec.role == role for worker in self.workers.values())
        spec = WorkerSpec(
            name=f"{role}-{number:03}",
            role=role,
            machine=pool.machine,
            scheduler=pool.scheduler(tells_cache=self.layout.settings.mirrors_cache(ROLES[role])),
            streamed=self.layout.streamed,
            report_period_s=self.layout.settings.report_period_s,
            seed=self._seed * 1009 + len(self.workers),
        )
        worker = self.workers[spec.name] = VirtualWorker(spec, self.fabric, self._next_host(pool.machine))
        return worker

    def add_worker(self, role: str) -> VirtualWorker:
        """Add a worker. Routers find it at their next refresh."""
        worker = self._worker(role, self.layout.pools[role])
        self.pools[role].workers[worker.spec.name] = worker
        return worker

    async def add_router(self, layout: Layout | None = None) -> VirtualRouter:
        """Start a router, with the settings and promises of ``layout``."""
        router = self._router(f"router-{next(self._router_numbers)}", layout or self.layout)
        self.board.router_ids.append(router.router_id)
        self.routers.append(router)
        await router.start()
        return router

    async def remove_router(self, router: VirtualRouter) -> None:
        """Close a router; one whose connections were cut before has died, and tells nobody."""
        self.board.router_ids.remove(router.router_id)
        self.routers.remove(router)
        await router.close()

    def _next_host(self, machine: Machine) -> Host:
        """The host for the next worker: hosts are filled one after another."""
        if self._num_on_host >= machine.workers_per_host:
            self._num_hosts, self._num_on_host = self._num_hosts + 1, 0
            self._host = Host(self._address())
        self._num_on_host += 1
        return self._host

    def _address(self) -> str:
        return f"10.{self._num_hosts // 65_536}.{self._num_hosts // 256 % 256}.{self._num_hosts % 256}"

    async def start(self) -> None:
        """Let the routers meet the workers."""
        await asyncio.gather(*(router.start() for router in self.routers))

    async def close(self) -> None:
        """Close all routers and workers."""
        await asyncio.gather(*(router.close() for router in self.routers))
        for worker in self.workers.values():
            worker.close()

    async def send(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        """Send each request at its time, counted from now, and wait for all answers."""
        started_s = asyncio.get_running_loop().time()
        return await asyncio.gather(*(self.ask(arrival, sent_s=started_s + arrival.at_s) for arrival in arrivals))

    async def ask(self, arrival: Arrival, *, sent_s: float | None = None) -> Outcome:
        """Send a request to the next router in turn, now or at ``sent_s``, and wait for the answer."""
        number = next(self._numbers)
        router = self.routers[number % len(self.routers)]
        loop, model = asyncio.get_running_loop(), self.layout.machine.router
        sent_s = loop.time() if sent_s is None else sent_s
        outcome = Outcome(
            sent_s=sent_s, kind=arrival.kind, num_prompt_tokens=len(arrival.prompt), promise=arrival.promise
        )
        await asyncio.sleep(max(sent_s + model.accept_s - loop.time(), 0.0))
        requests = [
            GenerateRequest(
                request_id=f"request-{number}/{index}" if index else f"request-{number}",
                prompt_token_ids=arrival.prompt,
                sampling=SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=number),
                arrival_s=loop.time(),
                promise=arrival.promise.over(self.layout.promise),
            )
            for index, num_tokens in enumerate((arrival.num_output_tokens, *arrival.other_outputs))
        ]
        router.hear_late_loads()
        try:
            first, *others = router.orchestrator.start_choices(
                [requests], timeout_s=self.layout.settings.default_timeout_s
            )
        except RouterError as error:
            outcome.error = str(error)
            return outcome
        beside = [asyncio.create_task(self._read(other, replace(outcome, token_times_s=[]))) for other in others]
        await self._read(first, outcome)
        for other in await asyncio.gather(*beside) if beside else ():
            outcome.num_tokens += other.num_tokens
            outcome.error = outcome.error or other.error
        num_due = arrival.num_output_tokens + sum(arrival.other_outputs)
        if outcome.error is None and outcome.num_tokens != num_due:
            outcome.error = f"{outcome.num_tokens} of {num_due} tokens"
        return outcome

    async def _read(self, generation: Generation, outcome: Outcome) -> Outcome:
        """Record the tokens of one choice as they arrive."""
        loop = asyncio.get_running_loop()
        messages = Messages(self.layout.machine.router, name=generation.request_id, seed=self._seed)
        generation.mailbox.joins_deltas = True
        try:
            while deltas := await generation.take():
                num_tokens = sum(len(delta.token_ids) for delta in deltas)
                if num_tokens:
                    outcome.num_tokens += num_tokens
                    times_s = self.fabric.token_times.take(
                        generation.request_id, num_tokens=num_tokens, now_s=loop.time()
                    )
                    outcome.token_times_s += messages.arrive(times_s)
        except RouterError as error:
            outcome.error = str(error)
        return outcome

    async def rest(self) -> None:
        """Return when no worker holds anything for a request."""
        for worker in self.workers.values():
            await worker.rest()


@contextlib.asynccontextmanager
async def virtual_cluster(
    layout: Layout, *, seed: int = 0, network: Callable[[], Connections] | None = None
) -> AsyncIterator[VirtualCluster]:
    """A started cluster, closed at the end."""
    cluster = VirtualCluster(layout, seed=seed, network=network)
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The result of a load on a layout. ``busy_s`` is how long each worker computed. ``took_s`` is the real duration of
    the simulation, ``virtual_s`` the virtual one, and ``started_s`` the virtual time when the load began.
    ``busy_in_s``: for each virtual second, how long all workers computed in steps that began in it.
    """

    outcomes: Sequence[Outcome]
    busy_s: Sequence[float]
    busy_in_s: Mapping[int, float]
    started_s: float
    virtual_s: float
    took_s: float


def simulate(layout: Layout, arrivals: Sequence[Arrival], *, seed: int = 0, warm_up: Sequence[Arrival] = ()) -> Run:
    """Serve a load with a layout. Before it, ``warm_up`` is served, which does not count: from it workers learn how
    long steps take.

    The same arguments give exactly the same run, to the last digit.
    """

    async def serve() -> Run:
        random.seed(seed)  # for random routing policies
        began_s = time.perf_counter()
        async with virtual_cluster(layout, seed=seed) as cluster:
            await cluster.send(warm_up)
            before_s = [worker.runner.busy_s for worker in cluster.workers.values()]
            started_s = asyncio.get_running_loop().time()
            outcomes = await cluster.send(arrivals)
            virtual_s = asyncio.get_running_loop().time()
            await cluster.rest()
            after_s = [worker.runner.busy_s for worker in cluster.workers.values()]
            busy_s = [after - before for before, after in zip(before_s, after_s, strict=True)]
            busy_in_s: defaultdict[int, float] = defaultdict(float)
            for worker in cluster.workers.values():
                for second, seconds in worker.runner.busy_in_s.items():
                    busy_in_s[second] += seconds
        return Run(
            outcomes=outcomes,
            busy_s=busy_s,
            busy_in_s=busy_in_s,
            started_s=started_s,
            virtual_s=virtual_s,
            took_s=time.perf_counter() - began_s,
        )

    with choices_of(layout, arrivals):
        return run_virtually(serve())


def choices_of(layout: Layout, arrivals: Sequence[Arrival]) -> contextlib.AbstractContextManager[None]:
    """A context for the simulation of a load. If requests are placed by predictions, it sets how these are computed."""
    return MACHINE_CODE.for_choices(len(arrivals) if layout.settings.is_elastic else 0, layout.num_workers)
