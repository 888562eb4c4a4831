"""The clock of the running event loop, which a test can move on: so a timeout can be too long for any busy machine to
reach it by chance, and ends as soon as the test has what it needs."""

from __future__ import annotations

import asyncio


class LoopTime:
    """Takes over the running loop's clock, for as long as the loop lives."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time
        self._added_s = 0.0
        self._loop.time = self  # type: ignore[method-assign]

    def __call__(self) -> float:
        """The time that the event loop sees."""
        return self._time() + self._added_s

    def advance(self, by_s: float) -> None:
        """Advance the time: timers up to then fire in the loop's next iteration."""
        self._added_s += by_s
