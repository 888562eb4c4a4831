"""What happens to an engine whose bookkeeping turns out to be damaged while it carries out a command."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from engine.contract.errors import EngineDeadError
from engine.frontend.async_engine import AsyncEngine
from engine.frontend.client_stream import ENGINE_DEAD
from engine.frontend.engine_core import EngineCore
from tests.support.engine.chain_engine import chain_engine
from tests.support.engine.local_client import run_to_end
from tests.support.engine.pausable_runner import PausableRunner
from tests.support.engine.requests import greedy_request


class CoreThatCannotAbort(EngineCore):
    """Fails as soon as there is something to abort."""

    def abort(self, request_ids: Iterable[str]) -> None:
        """Fail, unless there is nothing to do."""
        for request_id in request_ids:
            raise RuntimeError(f"the books of {request_id} are gone")


async def test_a_failing_command_ends_the_engine_and_leaves_none_behind_it_unanswered() -> None:
    core = chain_engine()
    runner = PausableRunner(core.runner)
    engine = AsyncEngine(lambda: CoreThatCannotAbort(scheduler=core.scheduler, runner=runner, wake=core.wake))
    await engine.start()
    runner.hold()
    running = asyncio.create_task(run_to_end(engine, greedy_request("a", [1, 2, 3], max_tokens=100)))
    await asyncio.to_thread(runner.wait_entered)
    engine.abort_nowait(["a"])
    behind = asyncio.create_task(run_to_end(engine, greedy_request("b", [4, 5], max_tokens=4)))
    await asyncio.sleep(0)
    engine.abort_nowait(["b"])
    runner.let_go()

    async with asyncio.timeout(60):
        assert (await running).error == ENGINE_DEAD
        assert (await behind).error == ENGINE_DEAD
    with pytest.raises(EngineDeadError, match="the books of a are gone"):
        engine.check_health()
    await engine.close()
