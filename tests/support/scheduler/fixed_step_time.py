"""A scheduler whose step times are fixed, and that learns nothing from them."""

from __future__ import annotations

import math

from engine.contract.step_time import StepTimeModel, StepWork
from engine.scheduler.policy.step_time_fit import StepTimeFit
from engine.scheduler.scheduler import Scheduler


class FixedStepTime(StepTimeFit):
    """A fit that never changes."""

    def __init__(self, model: StepTimeModel) -> None:
        super().__init__()
        self.model = model
        self.most_prompt_tokens = math.inf

    def note(self, work: StepWork, seconds: float, *, cores: float = 1.0, passed_s: float = 0.0) -> None:
        """Learn nothing."""


def know_step_times(scheduler: Scheduler, model: StepTimeModel) -> None:
    """Have a scheduler use ``model`` from now on."""
    scheduler._timer._fit = FixedStepTime(model)
