"""Runs a random world: the real routers and schedulers, with faults, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from engine.contract.messages import FinishReason, GenerateRequest, SamplingParams
from engine.contract.step_time import StepTimeModel
from engine.contract.token_ids import TokenIds
from kv_transfer.fault_options import FaultOptions
from router.errors import RouterError
from router.pool.workers import WorkerError
from router.request.generation import Generation
from router.settings import RouterSettings
from simulation.cluster import VirtualCluster, VirtualRouter, virtual_cluster
from simulation.faults.network import Connection, Connections
from simulation.layout import Layout, Pool
from simulation.loads import Arrival
from simulation.machine import CPU_CORE, Machine
from simulation.step_runner import VOCAB_SIZE
from simulation.virtual_loop import run_virtually
from simulation.worker import VirtualWorker
from tests.support.simulation.fault_plan import Ask, FaultEvent, Kind, WorldPlan
from tests.support.simulation.world_checks import holders, unrest

REST_S = 120
"""How long after the last answer and the last fault everything must be at rest: leases live for 30 s."""

LONGEST_S = 700
"""A router that is replaced has ended its requests by then."""

SOON_S = 1.0
SHARED_PROMPT = 160
STEP_TIME = StepTimeModel(base_s=0.03, row_s=0.001, context_token_s=0.0, prompt_token_s=0.0005, num_steps=1)
MACHINE = replace(CPU_CORE, step_time=STEP_TIME, step_noise=0.1, max_model_len=512)


@dataclass(slots=True, kw_only=True)
class Answer:
    """One choice as its client saw it. ``error`` is the code of the error that ended it. ``held_by`` are the workers
    that had something of it ``SOON_S`` after its end.
    """

    ask: Ask
    num_output: int
    expected: Sequence[int]
    sent_s: float
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    num_after_finish: int = 0
    error: str | None = None
    message: str = ""
    ended_s: float | None = None
    has_lost_router: bool = False
    held_by: Sequence[str] = ()


@dataclass(slots=True, kw_only=True)
class Told:
    """What a world showed. ``blamed`` are the workers that some router left out, ``defects`` logged errors, ``unrest``
    what is not at rest in the end.
    """

    answers: list[Answer] = field(default_factory=list)
    blamed: dict[str, str] = field(default_factory=dict)
    defects: list[str] = field(default_factory=list)
    unrest: Sequence[str] = ()


class _Log(logging.Handler):
    """Collects what routers log of workers that they leave out, and every logged error."""

    def __init__(self, told: Told) -> None:
        super().__init__(logging.WARNING)
        self._told = told

    def emit(self, record: logging.LogRecord) -> None:
        if "is left out" in record.msg and isinstance(record.args, tuple):
            _, name, reason = record.args
            self._told.blamed[str(name)] = str(reason)
        elif record.levelno >= logging.ERROR:
            self._told.defects.append(f"{record.name}: {logging.Formatter().format(record)}")


@contextlib.contextmanager
def _listening(told: Told) -> Iterator[None]:
    handler, loggers = _Log(told), [logging.getLogger(name) for name in ("baton", "asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def run_world(plan: WorldPlan) -> Told:
    """Everything that a world showed."""
    told = Told()

    async def run() -> None:
        random.seed(plan.seed)  # for random routing policies
        network = partial(Connections, are_links=plan.are_links)
        async with virtual_cluster(layout_of(plan), seed=plan.seed, network=network) as cluster:
            await FaultWorld(plan, cluster, told).run()

    with _listening(told):
        run_virtually(run())
    return told


def layout_of(plan: WorldPlan) -> Layout:
    machine = replace(MACHINE, num_blocks=plan.num_blocks)
    if plan.share_hosts:
        machine = replace(machine, shared_step_time=replace(STEP_TIME, base_s=0.045), workers_per_host=2)
    return Layout(
        name="world",
        prefill=_pool(plan, plan.num_prefill, machine),
        decode=_pool(plan, plan.num_decode, machine),
        settings=replace(RouterSettings(max_write_delay_s=0.0), **plan.settings),  # type: ignore[arg-type]
        num_routers=plan.num_routers,
        streamed=plan.streamed,
        promise=plan.promise,
    )


def _pool(plan: WorldPlan, num_workers: int, machine: Machine) -> Pool:
    return Pool(
        num_workers=num_workers,
        machine=machine,
        chunk=plan.chunk,
        jump=plan.jump,
        max_num_seqs=plan.max_num_seqs,
        max_num_waiting=plan.max_num_waiting,
    )


class FaultWorld:
    """One run of a world."""

    def __init__(self, plan: WorldPlan, cluster: VirtualCluster, told: Told) -> None:
        self._plan = plan
        self._cluster = cluster
        self._told = told
        self._loop = asyncio.get_running_loop()
        self._names = tuple(cluster.workers)
        self._first_routers = tuple(cluster.routers)
        self._open = list(cluster.routers)
        self._is_open = asyncio.Event()
        """Cleared until a router is started in place of the last one."""
        self._is_open.set()
        self._lost: set[VirtualRouter] = set()
        self._replaced: set[str] = set()

    async def run(self) -> None:
        """Let everything happen; return at rest, or when it should have been."""
        plan = self._plan
        if plan.is_warm:
            await self._cluster.send([_warm_up(number) for number in range(3 * plan.num_workers)])
        faults = [asyncio.create_task(self._happen(fault)) for fault in plan.faults]
        await asyncio.gather(*(self._ask(number, ask) for number, ask in enumerate(plan.asks)))
        await asyncio.gather(*faults)
        for router in self._cluster.routers:
            for connection in router.connections.all() if router.connections is not None else ():
                connection.mend()
        for _ in range(REST_S):
            await asyncio.sleep(1.0)
            self._told.unrest = unrest(self._cluster)
            if not self._told.unrest:
                break

    # ---- requests

    async def _ask(self, number: int, ask: Ask) -> None:
        await asyncio.sleep(ask.at_s)
        await self._is_open.wait()
        router = self._open[ask.router % len(self._open)]
        prompt = _prompt(number, ask)
        now_s, answers, requests = self._loop.time(), list[Answer](), list[GenerateRequest]()
        for index, num_output in enumerate(ask.outputs):
            seed = 1 + number * 8 + index
            requests.append(
                GenerateRequest(
                    request_id=f"request-{number}/{index}",
                    prompt_token_ids=prompt,
                    sampling=SamplingParams(max_tokens=num_output, ignore_eos=True, seed=seed),
                    arrival_s=now_s,
                    priority=ask.priority,
                    promise=ask.promise.over(self._plan.promise),
                )
            )
            expected = [(seed * 7919 + len(prompt) + place) % VOCAB_SIZE for place in range(num_output)]
            answers.append(Answer(ask=ask, num_output=num_output, expected=expected, sent_s=now_s))
        self._told.answers += answers
        router.hear_late_loads()
        try:
            generations = router.orchestrator.start_choices(
                [requests], timeout_s=ask.timeout_s, session_id=ask.session_id
            )
        except RouterError as error:
            for answer in answers:
                answer.error, answer.message, answer.ended_s = error.code, error.message, now_s
            return
        if ask.cancel_after_s is not None:
            self._loop.call_later(ask.cancel_after_s, _cancel_all, generations)
        await asyncio.gather(*map(self._read, generations, answers))
        for answer in answers:
            answer.has_lost_router = router in self._lost

    async def _read(self, generation: Generation, answer: Answer) -> None:
        try:
            while deltas := await generation.take():
                for delta in deltas:
                    answer.num_after_finish += answer.finish is not None
                    answer.tokens += delta.token_ids
                    answer.finish = delta.finish_reason
        except RouterError as error:
            answer.error, answer.message = error.code, error.message
        answer.ended_s = self._loop.time()
        await asyncio.sleep(SOON_S)
        answer.held_by = holders(self._cluster, generation.request_id)

    # ---- faults

    async def _happen(self, fault: FaultEvent) -> None:
        await asyncio.sleep(fault.at_s)
        if fault.kind in (Kind.ROUTER_DIES, Kind.ROUTER_REPLACED):
            await self._change_router(fault)
            return
        worker = self._cluster.workers[self._names[fault.worker]]
        if worker.is_gone:
            return
        if fault.kind in (Kind.SLOW, Kind.LATE_REPORTS, Kind.SILENCE, Kind.CUT):
            await self._disturb(fault, worker)
        elif fault.kind in (Kind.KILL, Kind.DRAIN, Kind.ADD_WORKER):
            await self._change_workers(fault, worker)
        elif fault.kind in (Kind.RESET_CACHE, Kind.LEAN):
            await self._order(fault, worker)
        else:
            begin, end = self._of_process(fault, worker)
            begin()
            await asyncio.sleep(fault.for_s)
            end()

    def _of_process(self, fault: FaultEvent, worker: VirtualWorker) -> tuple[Callable[[], None], Callable[[], None]]:
        if fault.kind is Kind.STOP:
            return worker.process.stop, worker.process.go_on
        if fault.kind is Kind.STICK:
            return worker.process.stick, worker.process.go_on
        plan = worker.transfers.faults
        some = FaultOptions(
            seed=self._plan.seed,
            read_fails=0.4,
            bit_flips=0.4,
            lease_expired=0.2,
            read_late=0.4,
            late_s=fault.delay_s,
        )
        return lambda: plan.change(some), lambda: plan.change(FaultOptions())

    async def _disturb(self, fault: FaultEvent, worker: VirtualWorker) -> None:
        routers = self._first_routers if fault.router is None else (self._first_routers[fault.router],)
        connections = [item.connections.to(worker.spec.name) for item in routers if item.connections is not None]
        for connection in connections:
            _break(connection, fault)
        await asyncio.sleep(fault.for_s)
        for connection in connections:
            connection.mend()

    async def _change_workers(self, fault: FaultEvent, worker: VirtualWorker) -> None:
        role = worker.spec.role
        if fault.kind is Kind.ADD_WORKER:
            self._cluster.add_worker(role)
            return
        if fault.kind is Kind.KILL:
            worker.kill()
        else:
            with contextlib.suppress(WorkerError):
                await self._cluster.pools[role].drain(worker.spec.name)
        await asyncio.sleep(fault.for_s)
        if fault.is_replaced and worker.spec.name not in self._replaced:
            self._replaced.add(worker.spec.name)
            self._cluster.add_worker(role)

    async def _order(self, fault: FaultEvent, worker: VirtualWorker) -> None:
        pool, name = self._cluster.pools[worker.spec.role], worker.spec.name
        with contextlib.suppress(WorkerError):
            if fault.kind is Kind.LEAN:
                await pool.lean(name, "prefill" if fault.is_replaced else "decode")
            else:
                await pool.reset_prefix_cache(name, preempt_running=fault.is_replaced)

    async def _change_router(self, fault: FaultEvent) -> None:
        router = self._first_routers[fault.router or 0]
        if router not in self._open:
            return
        self._open.remove(router)
        if fault.kind is Kind.ROUTER_DIES:
            self._lost.add(router)
            assert router.connections is not None
            router.connections.die()
        if fault.kind is Kind.ROUTER_REPLACED or not self._open:
            if not self._open:
                self._is_open.clear()
            changed = replace(self._plan, settings=self._plan.changed_settings)
            self._open.append(await self._cluster.add_router(layout_of(changed)))
            self._is_open.set()
        for _ in range(LONGEST_S if fault.kind is Kind.ROUTER_REPLACED else 0):
            if not router.orchestrator.num_alive:
                break
            await asyncio.sleep(1.0)
        await self._cluster.remove_router(router)


def _prompt(number: int, ask: Ask) -> TokenIds:
    first = 0 if ask.family is None else 1 + ask.family
    shared = [first * 1000 + place for place in range(min(ask.num_prompt, SHARED_PROMPT) if first else 0)]
    own = [5000 + number * 400 + place for place in range(ask.num_prompt - len(shared))]
    return TokenIds.of([*shared, *own])


def _warm_up(number: int) -> Arrival:
    """A request from which workers learn what their steps take."""
    prompt = TokenIds.of([20_000 + number * 200 + place for place in range(150)])
    return Arrival(at_s=0.0, prompt=prompt, num_output_tokens=12)


def _cancel_all(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.cancel()


def _break(connection: Connection, fault: FaultEvent) -> None:
    if fault.kind is Kind.CUT:
        connection.cut(is_refused=fault.is_replaced)
    elif fault.kind is Kind.SILENCE:
        connection.be_silent()
    else:
        connection.slow_down(fault.delay_s, is_only_back=fault.kind is Kind.LATE_REPORTS)
