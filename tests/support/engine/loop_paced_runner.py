"""A runner that is never faster than the event loop of its clients."""

from __future__ import annotations

import asyncio

from engine.contract.executor import StepRunner
from engine.contract.step import PendingStep, SchedulerOutput

TIMEOUT_S = 60.0


class LoopPacedRunner:
    """Wraps a runner; before each step the event loop runs this many iterations.

    An engine without a model ends its requests before a client in the same process has read their first token, if the
    machine is slow enough. What a client does between two steps is bounded in turns of the loop, not in seconds.
    """

    def __init__(self, inner: StepRunner, *, num_turns: int) -> None:
        self._inner = inner
        self._num_turns = num_turns
        self._loop = asyncio.get_running_loop()

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Let the event loop run, then launch."""
        if output.has_work:
            asyncio.run_coroutine_threadsafe(self._turn(), self._loop).result(TIMEOUT_S)
        return self._inner.launch(output)

    async def _turn(self) -> None:
        for _ in range(self._num_turns):
            await asyncio.sleep(0)
