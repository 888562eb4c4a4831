"""The stream of a router that mirrors the prefix cache, while the engine is slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from engine.contract.block_hash import KEY_BYTES
from engine.contract.config import SchedulerConfig
from engine.contract.messages import StepMessage
from engine.frontend.async_engine import AsyncEngine
from tests.support.engine.chain_engine import chain_engine
from tests.support.engine.local_client import run_to_end
from tests.support.engine.pausable_runner import PausableRunner
from tests.support.engine.requests import greedy_request

PERIOD_S = 0.05


class Bench:
    """An engine whose steps can be held, and one router's stream from it."""

    def __init__(self) -> None:
        core = chain_engine(scheduler=SchedulerConfig(max_num_seqs=16, enable_cache_events=True))
        core.runner = self.runner = PausableRunner(core.runner)
        self.engine = AsyncEngine(lambda: core, report_period_s=PERIOD_S)
        self.stream: AsyncIterator[StepMessage] = self.engine.outputs("router", mirrors_cache=True)
        self._request: asyncio.Task[object] | None = None

    async def begin_long_step(self) -> None:
        self.runner.hold()
        self._request = asyncio.create_task(run_to_end(self.engine, greedy_request("a", range(8), max_tokens=2)))
        await asyncio.to_thread(self.runner.wait_entered)

    async def next_message(self) -> StepMessage:
        async with asyncio.timeout(60):
            return await anext(self.stream)

    async def close(self) -> None:
        self.runner.let_go()
        if self._request is not None:
            await self._request
        await self.engine.close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await bench.engine.start()
    yield bench
    await bench.close()


async def test_stream_that_begins_during_a_long_step_reports_at_once(bench: Bench) -> None:
    await bench.begin_long_step()
    reports = [await bench.next_message() for _ in range(3)]
    bench.runner.let_go()
    while not (message := await bench.next_message()).cache:
        pass

    assert [report.cache for report in reports] == [(), (), ()]
    assert message.cache[0].is_snapshot


async def test_snapshot_that_is_asked_for_during_a_long_step_holds_no_report_up(bench: Bench) -> None:
    assert (await bench.next_message()).cache[0].is_snapshot
    await bench.begin_long_step()
    bench.engine.resync_cache("router")
    reports = [await bench.next_message() for _ in range(3)]
    bench.runner.let_go()
    stored = 0
    while stored < 2 * KEY_BYTES:
        changes = (await bench.next_message()).cache
        stored = max([stored, *(len(item.stored) for item in changes)])

    assert [report.cache for report in reports] == [(), (), ()]


async def test_stream_that_is_closed_before_its_snapshot_came_leaves_nothing(bench: Bench) -> None:
    await bench.begin_long_step()
    await bench.next_message()
    await bench.stream.aclose()  # type: ignore[attr-defined]  # the engine's iterator is a generator
    bench.runner.let_go()

    await run_to_end(bench.engine, greedy_request("b", range(8), max_tokens=2))
