"""Simulated workers whose steps take the time that their model predicts, and routers that move streams between them.

Reports come late, and so do moved streams: what a router knows is older than what others have done since.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.contract.messages import GenerateRequest, LoadReport, SamplingParams, WorkerInfo
from engine.contract.promise import Promise
from engine.contract.role import Work
from engine.contract.step_time import UNKNOWN_STEP_TIME, StepTimeModel
from engine.contract.token_ids import TokenIds
from router.balance.moves import WorkerState
from router.balance.rebalancer import Rebalancer, worker_state
from router.balance.streams import LiveStream, LiveStreams, MoveReason
from router.pool.demand import Demand
from router.pool.replica import Replica
from router.report.counters import RouterCounters
from router.settings import RouterSettings
from tests.support.router.fake_workers import FakeDecodePool, FakePrefillPool

BLOCK_SIZE = 16
TICK_S = 0.5
LANDS_AFTER_TICKS = 2
MODEL = StepTimeModel(base_s=0.005, row_s=0.001, context_token_s=1e-7, error=0.05, num_steps=1000)
WAITS = RouterSettings(rebalance=True, report_period_s=TICK_S)


def replica_of(name: str, load: LoadReport, *, now_s: float) -> Replica:
    """A worker as a router knows it after a report."""
    replica = Replica(name)
    replica.info = WorkerInfo(
        role="decode",
        engine_id=name,
        incarnation="1",
        node_ip="127.0.0.1",
        pid=1,
        model_name="tiny",
        block_size=BLOCK_SIZE,
        num_blocks=load.num_blocks,
        block_bytes=1 << 16,
        max_model_len=1 << 16,
        vocab_size=100,
        device="cpu",
        dtype="float32",
    )
    replica.report(load, now_s)
    return replica


class KnownPool:
    """The workers as one router knows them."""

    def __init__(self, world: BalanceWorld) -> None:
        self.workers = FakeDecodePool(prefill=FakePrefillPool())
        self._world = world

    @property
    def replicas(self) -> Sequence[Replica]:
        """The workers according to their reports of one tick ago."""
        return [replica_of(name, load, now_s=self._world.now_s) for name, load in self._world.reports.items()]

    def that_take(self, work: Work) -> Sequence[Replica]:
        """Every worker takes any work."""
        return self.replicas

    def cached_tokens(self, demand: Demand) -> Mapping[str, int]:
        """No prompt has cached tokens."""
        return {}

    def age_s(self, replica: Replica) -> float:
        """All reports have the same age."""
        return TICK_S


@dataclass(slots=True, kw_only=True, eq=False)
class SimRouter:
    """A router and its streams."""

    streams: LiveStreams
    rebalancer: Rebalancer
    counters: RouterCounters
    is_alive: bool = True


@dataclass(slots=True, kw_only=True, eq=False)
class _OnItsWay:
    router: SimRouter
    stream: LiveStream
    lands_at_tick: int


@dataclass(slots=True, kw_only=True)
class BalanceWorld:
    """``moves`` are all ordered moves: when, which stream, from where to where, and why."""

    num_workers: int
    num_routers: int = 1
    num_blocks: int = 10_000
    model: StepTimeModel = MODEL
    settings: RouterSettings = WAITS
    seed: int = 0
    now_s: float = 100.0
    num_ticks: int = 0
    routers: list[SimRouter] = field(default_factory=list)
    reports: dict[str, LoadReport] = field(default_factory=dict)
    moves: list[tuple[int, str, str, str, MoveReason]] = field(default_factory=list)
    num_landed: int = 0
    _on_their_way: list[_OnItsWay] = field(default_factory=list)
    _num_streams: int = 0

    def __post_init__(self) -> None:
        source = random.Random(self.seed)
        for _ in range(self.num_routers):
            streams, counters = LiveStreams(clock=lambda: self.now_s), RouterCounters()
            rebalancer = Rebalancer(
                KnownPool(self),
                streams,
                settings=self.settings,
                counters=counters,
                clock=lambda: self.now_s,
                draw=random.Random(source.random()).random,
            )
            self.routers.append(SimRouter(streams=streams, rebalancer=rebalancer, counters=counters))
        self.reports = {name: self.load_of(name) for name in self.names}

    @property
    def names(self) -> list[str]:
        """The workers."""
        return [f"w{index}" for index in range(self.num_workers)]

    def add(
        self, worker: str, *, router: int = 0, num_tokens: int = 200, max_tokens: int = 5000, itl_ms: float | None = 50
    ) -> LiveStream:
        """Add a stream that has been on a worker for long."""
        self._num_streams += 1
        request = GenerateRequest(
            request_id=f"r{self._num_streams}",
            prompt_token_ids=TokenIds.of([1] * num_tokens),
            sampling=SamplingParams(max_tokens=max_tokens),
            promise=Promise(itl_ms=itl_ms),
        )
        stream = self.routers[router].streams.enter(request, [], replica_id=worker, num_moves=0)
        stream.since_s -= 1000.0
        stream.num_tokens_before = -1000
        return stream

    def rows(self, worker: str) -> list[LiveStream]:
        """The streams that a worker generates."""
        return [stream for router in self.routers if router.is_alive for stream in router.streams.at(worker)]

    def load_of(self, worker: str) -> LoadReport:
        """The report that a worker would send now."""
        rows = self.rows(worker)
        contexts = [stream.num_context_tokens for stream in rows]
        num_used = sum(-(-number // BLOCK_SIZE) for number in contexts)
        return LoadReport(
            num_blocks=self.num_blocks,
            num_free_blocks=self.num_blocks - num_used,
            num_running=len(rows),
            num_decoding=len(rows),
            num_context_tokens=sum(contexts),
            step_time=self.model,
        )

    def state(self, worker: str) -> WorkerState:
        """The current state of a worker."""
        return worker_state(replica_of(worker, self.load_of(worker), now_s=self.now_s))

    def tick(self, *, grows: bool = True) -> None:
        """Half a second: routers check one after the other, moved streams arrive, streams grow, workers report."""
        reports = {name: self.load_of(name) for name in self.names}
        for router in self.routers:
            if router.is_alive:
                self._look(router)
        self._land()
        if grows and self.model is not UNKNOWN_STEP_TIME:
            for name in self.names:
                num_tokens = max(int(TICK_S / max(self.state(name).gap_s, 0.001)), 1)
                for stream in self.rows(name):
                    list_of(stream).extend([1] * num_tokens)
        self.reports = reports
        self.num_ticks += 1
        self.now_s += TICK_S

    def run(self, num_ticks: int, *, grows: bool = True) -> None:
        """Run this many ticks, and check the limits after each."""
        for _ in range(num_ticks):
            self.tick(grows=grows)
            self.check_bounds()

    def kill(self, router: int) -> None:
        """A router dies, and its streams with it, including those that are being moved."""
        self.routers[router].is_alive = False
        self._on_their_way = [item for item in self._on_their_way if item.router is not self.routers[router]]

    def check_bounds(self) -> None:
        """Check the limits that no router may exceed."""
        for router in self.routers:
            ordered = [stream for stream in router.streams.all() if stream.order is not None]
            assert len(ordered) <= self.settings.rebalance_max_in_flight
            assert all(stream.num_moves <= self.settings.rebalance_max_moves for stream in router.streams.all())

    def _look(self, router: SimRouter) -> None:
        for source, streams in router.rebalancer.look().items():
            for stream in streams:
                assert stream.order is not None
                assert stream.order.target is not None
                assert stream.order.target != source
                moved = (self.num_ticks, stream.request.request_id, source, stream.order.target, stream.order.reason)
                self.moves.append(moved)
                self._on_their_way.append(
                    _OnItsWay(router=router, stream=stream, lands_at_tick=self.num_ticks + LANDS_AFTER_TICKS)
                )

    def _land(self) -> None:
        due = [item for item in self._on_their_way if item.lands_at_tick <= self.num_ticks]
        self._on_their_way = [item for item in self._on_their_way if item.lands_at_tick > self.num_ticks]
        for item in due:
            stream = item.stream
            assert stream.order is not None
            assert stream.order.target is not None
            item.router.streams.leave(stream)
            item.router.streams.enter(
                stream.request,
                stream.output_token_ids,
                replica_id=stream.order.target,
                num_moves=stream.num_moves + 1,
            )
            self.num_landed += 1


def list_of(stream: LiveStream) -> list[int]:
    """A stream's tokens, to be added to."""
    tokens = stream.output_token_ids
    assert isinstance(tokens, list)
    return tokens
