"""The thread that owns an engine: what it does itself, and what does not have to wait for it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from engine.contract.errors import ConfigError, ConnectorDeadError, EngineDeadError
from engine.contract.executor import StepRunner
from engine.contract.step import PendingStep, SchedulerOutput
from engine.contract.tracing.request_timings import RequestTimings, TraceContext
from engine.frontend.async_engine import AsyncEngine
from engine.frontend.engine_core import EngineCore
from kv_transfer.inproc import InProcessFabric
from tests.support.clock import ManualClock
from tests.support.engine.chain_engine import chain_engine
from tests.support.engine.chain_runner import expected_tokens
from tests.support.engine.disaggregated import inproc_builder
from tests.support.engine.engine_pools import INPROC
from tests.support.engine.local_client import run_to_end
from tests.support.engine.pausable_runner import PausableRunner
from tests.support.engine.requests import greedy_request


class ThreadedRunner:
    """Remembers in which threads it computed."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self.threads: set[int] = set()

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Note the thread."""
        self.threads.add(threading.get_ident())
        return self._runner.launch(output)


async def test_engine_is_built_in_the_thread_that_steps_it() -> None:
    """Teams of threads belong to the thread that made them: a second one would take the processors of the first."""
    runners: list[ThreadedRunner] = []
    builders: list[int] = []

    def build() -> EngineCore:
        builders.append(threading.get_ident())
        core = chain_engine()
        runners.append(ThreadedRunner(core.runner))
        core.runner = runners[0]
        return core

    engine = AsyncEngine(build)
    await engine.start()
    delta = await run_to_end(engine, greedy_request("a", [5, 6, 7], max_tokens=4))
    await engine.close()

    assert list(delta.token_ids) == expected_tokens([5, 6, 7], 4)
    assert runners[0].threads == set(builders)
    assert builders != [threading.get_ident()]


class CoreNotes:
    """A ``StepThreads`` that notes what it is told; every second step borrows."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.rests = asyncio.Event()
        self.computes = self.is_closed = False
        self._loop = asyncio.get_running_loop()

    def begin_step(self) -> bool:
        """Note it."""
        self.num_steps, self.computes = self.num_steps + 1, True
        return self.num_steps % 2 == 0

    def between_layers(self) -> None:
        """Nothing."""

    @property
    def step_cores(self) -> float:
        """Its own alone, as far as anybody asks."""
        return 1.0

    def rest(self) -> None:
        """Note it, once a step has been."""
        if self.computes:
            self.computes = False
            self._loop.call_soon_threadsafe(self.rests.set)

    def close(self) -> None:
        """Note it."""
        self.is_closed = True


async def test_cores_are_lent_while_an_engine_has_nothing_to_compute() -> None:
    cores, timer_rests = CoreNotes(), []

    def build() -> EngineCore:
        core = chain_engine()
        core.share_cores(cores)
        core.scheduler.rest = lambda: timer_rests.append(cores.num_steps)  # type: ignore[method-assign]
        return core

    engine = AsyncEngine(build)
    await engine.start()
    await run_to_end(engine, greedy_request("a", [5, 6, 7], max_tokens=5))
    await asyncio.wait_for(cores.rests.wait(), 60)
    assert cores.num_steps == 5
    assert not cores.computes
    assert timer_rests[-1] == cores.num_steps, "the next step does not follow at once"
    assert engine.load.counters["num_borrowed_steps"] == 2
    await engine.close()

    assert cores.is_closed


async def test_blocks_are_looked_at_once_after_each_change_when_an_engine_comes_to_rest() -> None:
    core = chain_engine()
    looks: list[int] = []

    def look() -> None:
        looks.append(core.num_load_changes)
        raise AssertionError("a block leaked")

    async def take_turns() -> None:
        for _ in range(3):
            await engine._thread.call(lambda core: None)

    core.scheduler.check_integrity = look  # type: ignore[method-assign]
    engine = AsyncEngine(lambda: core)
    await engine.start()
    await run_to_end(engine, greedy_request("a", [5, 6, 7], max_tokens=2))
    await take_turns()
    num_looks = len(looks)
    await take_turns()
    assert len(looks) == num_looks > 0

    await run_to_end(engine, greedy_request("b", [5, 6, 7], max_tokens=2))
    await take_turns()
    await engine.close()

    assert len(looks) == len(set(looks)) > num_looks
    assert core.stats().num_integrity_failures == len(looks)


async def test_request_that_comes_during_a_step_has_waited_since_then() -> None:
    core, clock = chain_engine(), ManualClock()
    core.runner = runner = PausableRunner(core.runner)
    engine = AsyncEngine(lambda: core, clock=clock)
    await engine.start()
    runner.hold()
    running = asyncio.create_task(run_to_end(engine, greedy_request("a", [1, 2, 3], max_tokens=2)))
    await asyncio.to_thread(runner.wait_entered)
    stream = engine.outputs("late")
    await anext(stream)
    traced = replace(greedy_request("b", [4, 5], max_tokens=2, client_id="late"), trace=TraceContext())
    submission = asyncio.create_task(engine.submit([traced]))
    await asyncio.sleep(0)  # it has come, and waits for the step

    clock.advance(7.0)
    runner.let_go()

    assert await submission == [None]
    async for message in stream:
        if message.told:
            break
    [told], first = message.told, message.deltas[0]
    assert isinstance(told, RequestTimings)
    assert first.queue_s == told.queue_s >= 7.0
    assert told.steps[0].start_s >= 7.0
    await running
    await engine.close()


async def test_event_loop_goes_on_while_an_engine_is_built() -> None:
    may_end = threading.Event()

    def build() -> EngineCore:
        assert may_end.wait(120), "the event loop waited for the engine"
        return chain_engine()

    engine = AsyncEngine(build)
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    with pytest.raises(EngineDeadError, match="is not running"):
        engine.check_health()
    may_end.set()
    await starting

    engine.check_health()
    await engine.close()


async def test_what_prevents_an_engine_reaches_whoever_starts_it() -> None:
    def build() -> EngineCore:
        raise ConfigError("the KV cache does not fit")

    engine = AsyncEngine(build)

    with pytest.raises(ConfigError, match="does not fit"):
        await engine.start()
    with pytest.raises(EngineDeadError, match="does not fit"):
        engine.check_health()
    await engine.close()


class BusyConnector:
    """A connector that gets to a handshake when the test lets it."""

    def __init__(self) -> None:
        self.is_free = threading.Event()

    def accept(self, hello: Any) -> Any:
        """Answer with the same."""
        assert self.is_free.wait(120), "the event loop waited for the connector"
        return hello


async def test_handshake_keeps_nothing_else_waiting_on_the_event_loop() -> None:
    """The connector answers between its reads, and may be busy with one; the streams of all routers continue."""
    core = chain_engine()
    engine = AsyncEngine(lambda: core)
    await engine.start()
    connector: Any = BusyConnector()
    core.connector = connector
    hello: Any = object()

    meeting = asyncio.create_task(engine.handshake(hello))
    await asyncio.sleep(0)
    connector.is_free.set()

    assert await meeting is hello
    core.connector = None
    await engine.close()


async def test_worker_whose_connector_ended_is_not_healthy() -> None:
    core = chain_engine(build_connector=inproc_builder(InProcessFabric(), "d", INPROC))
    assert core.connector is not None
    engine = AsyncEngine(lambda: core)
    await engine.start()
    engine.check_health()

    core.connector.close()

    with pytest.raises(ConnectorDeadError):
        engine.check_health()
    await engine.close()
