"""Time as far as this process took part in it."""

from __future__ import annotations

import time
from collections.abc import Callable


class AttentiveClock:
    """A monotonic clock that stands still while nobody ticks it.

    Whoever measures the silence of others must not count the time in which it could not have heard them: a router
    that got no processor for ten seconds, or was stopped, finds messages of all workers waiting when it goes on. Each
    tick lets the clock run for at most ``max_gap_s`` more.
    """

    def __init__(self, *, max_gap_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._max_gap_s = max_gap_s
        self._last_tick = (clock(), 0.0)  # when, and the attention until then: replaced whole, for other threads

    def __call__(self) -> float:
        """Seconds of attention since the clock was made. From any thread."""
        ticked_at_s, passed_s = self._last_tick
        return passed_s + min(self._clock() - ticked_at_s, self._max_gap_s)

    def tick(self) -> None:
        """This process runs. From one thread only."""
        passed_s = self()
        self._last_tick = (self._clock(), passed_s)
