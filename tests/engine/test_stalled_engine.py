"""When an engine counts as hanging: it has work, and cores, but makes no steps."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.contract.errors import EngineStalledError
from engine.frontend.async_engine import AsyncEngine
from engine.frontend.engine_core import EngineCore
from engine.frontend.os_threads import CoreWaits, os_thread_name
from engine.frontend.progress import Progress
from engine.scheduler.policy.gates import Verdict
from engine.scheduler.requests.request import Request
from engine.scheduler.step_draft import StepDraft
from router.attentive_clock import AttentiveClock
from tests.support.clock import ManualClock
from tests.support.engine.chain_engine import chain_engine
from tests.support.engine.local_client import run_to_end
from tests.support.engine.pausable_runner import PausableRunner
from tests.support.engine.requests import greedy_request
from tests.support.waiting import wait_until

MOMENT, LATER = 1.0, 2.0
LONG_ENOUGH_S = 0.05


async def test_engine_that_makes_no_step_though_it_has_work_says_so_until_it_goes_on(
    core: EngineCore, runner: PausableRunner
) -> None:
    engine = AsyncEngine(lambda: core, step_timeout_s=0.05)
    await engine.start()
    runner.hold()
    answer = asyncio.create_task(run_to_end(engine, greedy_request("a", [5, 6, 7], max_tokens=4)))
    await asyncio.to_thread(runner.wait_entered)
    while not engine.is_stalled:  # noqa: ASYNC110 (a property of the clock)
        await asyncio.sleep(0.01)

    with pytest.raises(EngineStalledError, match=r"limit is 0\.05 s"):
        engine.check_health()
    assert engine.load.is_stalled

    runner.let_go()
    await answer
    while engine.is_stalled:  # noqa: ASYNC110 (the thread comes to rest after the last token)
        await asyncio.sleep(0.01)
    engine.check_health()
    assert not engine.load.is_stalled
    await engine.close()


async def test_engine_is_not_stalled_by_time_in_which_its_process_did_not_run(
    core: EngineCore, runner: PausableRunner
) -> None:
    world = ManualClock()
    clock = AttentiveClock(max_gap_s=1.0, clock=world)
    engine = AsyncEngine(lambda: core, step_timeout_s=30.0, clock=clock)
    await engine.start()
    runner.hold()
    answer = asyncio.create_task(run_to_end(engine, greedy_request("a", [5, 6, 7], max_tokens=4)))
    await asyncio.to_thread(runner.wait_entered)

    world.advance(40.0)  # stopped: nothing of the process runs, neither the step nor whoever ticks
    clock.tick()
    assert not engine.is_stalled
    engine.check_health()

    for _ in range(40):  # the process runs, the step does not end
        world.advance(0.9)
        clock.tick()
    assert engine.is_stalled

    runner.let_go()
    await answer
    await engine.close()


async def test_engine_is_not_stalled_by_time_in_which_its_threads_had_no_core(
    core: EngineCore, runner: PausableRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, waited_s = ManualClock(), [0.0]
    monkeypatch.setattr(CoreWaits, "since", lambda self, moment: waited_s[0])
    engine = AsyncEngine(lambda: core, step_timeout_s=30.0, clock=clock)
    await engine.start()
    runner.hold()
    answer = asyncio.create_task(run_to_end(engine, greedy_request("a", [5, 6, 7], max_tokens=4)))
    await asyncio.to_thread(runner.wait_entered)

    clock.advance(100.0)
    waited_s[0] = 71.0
    assert not engine.is_stalled
    engine.check_health()
    waited_s[0] = 69.0
    assert engine.is_stalled
    with pytest.raises(EngineStalledError, match=r"for 31\.0 s"):
        engine.check_health()

    runner.let_go()
    await answer
    await engine.close()


class ClosedGate:
    """A gate that admits no request."""

    def ask(self, request: Request, draft: StepDraft, num_tokens: int, /) -> Verdict:
        """Never."""
        return Verdict.BARRIER


async def test_engine_whose_requests_wait_for_nothing_says_so_whatever_it_is_asked_meanwhile() -> None:
    engine = AsyncEngine(lambda: chain_engine(gates=[ClosedGate()]), step_timeout_s=0.05)
    await engine.start()
    answer = asyncio.create_task(run_to_end(engine, greedy_request("a", [5, 6, 7], max_tokens=4)))
    while not engine.is_stalled:
        await engine.abort(["nobody"])
    with pytest.raises(EngineStalledError):
        engine.check_health()

    await engine.abort(["a"])
    await answer
    while engine.is_stalled:  # noqa: ASYNC110 (the thread comes to rest after the abort)
        await asyncio.sleep(0.01)
    await engine.close()


def test_turns_that_let_nobody_start_are_no_progress() -> None:
    clock = ManualClock()
    progress = Progress(clock)
    progress.end_turn(is_stuck=True)
    progress.rest()
    clock.advance(3)
    progress.begin_turn()
    progress.end_turn(is_stuck=True)
    progress.rest()
    assert progress.busy_s == 3

    progress.end_turn(is_stuck=False)
    assert progress.busy_s == 0


def test_progress_is_owed_only_by_who_has_something_to_do() -> None:
    clock = ManualClock()
    progress = Progress(clock)
    clock.advance(100)
    assert progress.busy_s == 0

    progress.asked()
    clock.advance(3)
    progress.asked()
    assert progress.busy_s == 3

    progress.begin_turn()
    clock.advance(2)
    assert progress.busy_s == 2

    progress.rest()
    assert progress.busy_s == 0


@contextmanager
def busy_thread(name: str, core: int) -> Iterator[None]:
    """A thread of this name that computes on one core, without the interpreter's lock."""
    ends = threading.Event()

    def compute() -> None:
        os.sched_setaffinity(0, {core})
        with os_thread_name(name):
            while not ends.is_set():
                hashlib.sha256(bytes(1 << 22))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


@contextmanager
def busy_process(core: int) -> Iterator[None]:
    """Another process that wants all of one core."""
    command = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", command])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_time_without_a_core_is_told_for_threads_of_the_name_alone() -> None:
    core = min(os.sched_getaffinity(0))
    waits, of_others = CoreWaits("engine starved"), CoreWaits("engine of nobody")
    of_others.since(MOMENT)
    with busy_process(core), busy_thread("engine starved", core):
        wait_until(lambda: waits.since(MOMENT) > LONG_ENOUGH_S)
        assert of_others.since(MOMENT) == 0.0


class KnownWaits(CoreWaits):
    """Waits of as many seconds as a test says."""

    def __init__(self) -> None:
        super().__init__("known")
        self.all_s: dict[str, float] = {}

    def _all_s(self) -> dict[str, float]:
        return dict(self.all_s)


def test_what_was_waited_before_a_moment_does_not_count_and_the_longest_wait_does() -> None:
    waits = KnownWaits()
    waits.all_s = {"1": 10.0, "2": 20.0}
    assert waits.since(MOMENT) == 0.0

    waits.all_s = {"1": 11.0, "2": 24.0}
    assert waits.since(MOMENT) == 4.0
    waits.all_s["3"] = 5.0  # it began meanwhile
    assert waits.since(MOMENT) == 5.0
    assert waits.since(LATER) == 0.0

    waits.all_s = {"2": 26.0}
    assert waits.since(LATER) == 2.0
    waits.all_s = {}
    assert waits.since(LATER) == 0.0
