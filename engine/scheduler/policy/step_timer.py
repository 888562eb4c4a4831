"""Times an engine's steps as they return, and learns from them what steps take. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from engine.contract.step_time import StepTimeModel, StepWork
from engine.scheduler.policy.step_time_fit import StepTimeFit
from engine.scheduler.requests import row_passes
from engine.scheduler.step_draft import Batch, StepInFlight

NOTE_PERIOD_S: Final = 0.001
"""Of steps that are shorter, one in so much time is learnt from: noting one takes some microseconds."""


class StepTimer:
    """The clock of steps, and the model fitted to them.

    A step that was scheduled behind another begins when that one returns. Of short steps the one after the period is
    noted, and not the one that ends it, which is more often one that something delayed.
    """

    def __init__(self, *, clock: Callable[[], float], fit: StepTimeFit | None = None) -> None:
        self._clock = clock
        self._fit = fit or StepTimeFit()
        self._returned_s = -math.inf
        self._unnoted_s = NOTE_PERIOD_S

    @property
    def model(self) -> StepTimeModel:
        """What a step takes by what it computes, as far as is known."""
        return self._fit.model

    def now_s(self) -> float:
        """The time at which a step is scheduled."""
        return self._clock()

    @property
    def returned_s(self) -> float:
        """The time at which the last step returned."""
        return self._returned_s

    def step_returned(self, step: StepInFlight) -> float:
        """Take note of a step; returns the seconds that it took."""
        now_s = self._clock()
        seconds = now_s - max(step.scheduled_s, self._returned_s)
        self._returned_s = now_s
        if self._unnoted_s >= NOTE_PERIOD_S and not step.batch.decodes_often:
            self._unnoted_s = 0.0
            self._fit.note(work_of(step.batch), seconds)
        self._unnoted_s += seconds
        return seconds


def work_of(batch: Batch) -> StepWork:
    """What a step computes. A row with one known token counts as one that decodes, whatever the token is."""
    return StepWork(*row_passes.work_of(batch.num_scheduled_tokens, batch.num_samples, batch.ends))
