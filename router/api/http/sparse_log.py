"""A log of warnings that anybody can cause, a line a minute for each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

PERIOD_S: Final = 60.0


class SparseLog:
    """Stands in for a logger. The same warning is written once in ``period_s``, with how often it came in between.

    Only warnings are held back, and only those with a fixed text may be written to it: it remembers each for good.
    """

    def __init__(
        self, logger: logging.Logger, *, period_s: float = PERIOD_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger, self._period_s, self._clock = logger, period_s, clock
        self._told_s: dict[str, float] = {}
        self._num_held: dict[str, int] = {}

    def warning(self, message: str) -> None:
        """Write a warning, or count it."""
        now_s = self._clock()
        if message in self._told_s and now_s - self._told_s[message] < self._period_s:
            self._num_held[message] = self._num_held.get(message, 0) + 1
            return
        seconds = now_s - self._told_s.get(message, now_s)
        self._told_s[message] = now_s
        if num_held := self._num_held.pop(message, 0):
            self._logger.warning("%s (and %d more times in the last %.0f s)", message, num_held, seconds)
        else:
            self._logger.warning("%s", message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)
