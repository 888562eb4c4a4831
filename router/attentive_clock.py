"""A clock that counts only the time in which this process was running."""

from __future__ import annotations

import time
from collections.abc import Callable


class AttentiveClock:
    """A monotonic clock that stops while nobody ticks it.

    A process that measures the silence of others must not count time in which it could not receive messages. A router
    that got no CPU for ten seconds, or was stopped, finds messages of all workers waiting when it continues. Each tick
    lets the clock run for at most ``max_gap_s`` more.
    """

    def __init__(self, *, max_gap_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._max_gap_s = max_gap_s
        self._last_tick = (clock(), 0.0)  # time, and attention until then: one tuple, for other threads

    def __call__(self) -> float:
        """Seconds of attention since the clock was created. From any thread."""
        ticked_at_s, passed_s = self._last_tick
        return passed_s + min(self._clock() - ticked_at_s, self._max_gap_s)

    def tick(self) -> None:
        """Note that this process is running. From one thread only."""
        passed_s = self()
        self._last_tick = (self._clock(), passed_s)
