"""When an engine's load is told anew: to put it together takes a third of what a decode step takes beside the model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from engine.engine_core import EngineCore
from engine.messages import LoadReport

LOAD_PERIOD_S: Final = 0.1
"""How old a report may be where running requests have only grown since."""


class LoadFeed:
    """The load after each turn of an engine's loop. Asked by the thread that steps the engine."""

    def __init__(self, core: EngineCore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._clock = clock
        self._report = core.load_report()
        self._told_at_s = clock()
        self._num_changes = core.num_load_changes

    def after_step(self) -> LoadReport:
        """The report, a new one if requests came, started, ended or moved, or if it is ``LOAD_PERIOD_S`` old."""
        if self._core.num_load_changes == self._num_changes and self._clock() - self._told_at_s < LOAD_PERIOD_S:
            return self._report
        return self.now()

    def now(self) -> LoadReport:
        """A new report."""
        self._num_changes = self._core.num_load_changes
        self._told_at_s = self._clock()
        self._report = self._core.load_report()
        return self._report
