"""Times an engine's steps as they return, for a model of step times to be fitted to them. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from engine.contract.step_time import StepTimeModel, StepWork
from engine.scheduler.policy.step_time_fit import FIT_PERIOD_S, STEPS_OF_KIND, FloatArray, StepTimeFit
from engine.scheduler.requests import row_passes
from engine.scheduler.step_draft import Batch, StepInFlight

NOTE_PERIOD_S: Final = 0.05
FIRST_PERIOD_S: Final = 0.001
"""Of steps shorter than ``NOTE_PERIOD_S``, one per period is learnt from: noting one takes some ten microseconds.
``FIRST_PERIOD_S`` takes its place for steps with prompts, and for all steps of a new worker.
"""


class StepTimer:
    """Measures each step's time, and keeps the model that is fitted to them.

    A step that was scheduled while another was in flight begins when that one returns. What is learnt of a step that
    follows on another without a rest is the time from one's return to the other's: that is how long tokens take, with
    what the engine does between steps. Of short steps, the first one after each period is noted, not the one that ends
    the period: that one is more likely to have been delayed.
    """

    def __init__(self, *, clock: Callable[[], float], fit: StepTimeFit | None = None) -> None:
        self._clock = clock
        self._fit = fit or StepTimeFit()
        self.returned_s = -math.inf
        """When the last step returned."""
        self._is_resting = True
        self._cores = 1.0
        self._unnoted_s = FIRST_PERIOD_S
        self._passed_s = 0.0
        self._noted: list[tuple[Batch, float, float, float]] = []
        self._noted_s = 0.0

    @property
    def model(self) -> StepTimeModel:
        """The model of step times, as far as it is known."""
        return self._fit.model

    @property
    def model_now(self) -> StepTimeModel:
        """The same model, for as many cores as the last step had."""
        return self._fit.model.on(self._cores)

    @property
    def most_prompt_tokens(self) -> float:
        """The most prompt tokens of a step that was noted."""
        return self._fit.most_prompt_tokens

    def step_scheduled(self) -> tuple[float, float]:
        """Now, when a step is scheduled, and from when on the engine has worked for it; see ``StepInFlight``."""
        now_s = self._clock()
        since_s = now_s if self._is_resting else self.returned_s
        self._is_resting = False
        return now_s, since_s

    def rest(self) -> None:
        """Note that the engine has nothing to compute."""
        self._is_resting = True

    def step_returned(self, step: StepInFlight, *, cores: float = 1.0, ends_s: Sequence[float] | None = None) -> float:
        """Learn from a step on ``cores`` times the worker's own cores; returns the seconds that it took.

        ends_s: when each of several decode steps in one ended; None: nothing is learnt from such steps.
        """
        now_s, before_s, batch, unnoted_s = self._clock(), self.returned_s, step.batch, self._unnoted_s
        self.returned_s, self._cores = now_s, cores
        begun_s = step.scheduled_s if step.scheduled_s > before_s else before_s
        if ends_s is not None:
            self._note_each(batch, np.diff(ends_s, prepend=begun_s), cores)
            return now_s - begun_s
        learnt_s = now_s - (step.since_s if step.since_s > before_s else before_s)
        if unnoted_s < NOTE_PERIOD_S and not self._fit.is_new and batch.num_tokens == batch.total_samples:
            self._unnoted_s = unnoted_s + learnt_s  # as most steps
            self._passed_s += learnt_s
        else:
            self._note(batch, learnt_s, cores)
        return now_s - begun_s

    def _note(self, batch: Batch, learnt_s: float, cores: float) -> None:
        """Learn from a step if it is due."""
        is_due = self._unnoted_s >= NOTE_PERIOD_S
        if not is_due and self._unnoted_s >= FIRST_PERIOD_S:
            is_due = self._fit.is_new or batch.has_prompts
        if is_due and not batch.decodes_often:
            passed_s = self._passed_s + learnt_s
            self._noted.append((batch, learnt_s, cores, passed_s))
            self._noted_s += passed_s if passed_s > learnt_s else learnt_s
            self._unnoted_s, self._passed_s = 0.0, -learnt_s
            if self._noted_s >= FIT_PERIOD_S or self._fit.is_new or batch.has_prompts:
                self.take_in()
        self._unnoted_s += learnt_s
        self._passed_s += learnt_s

    def take_in(self) -> None:
        """Let the fit have the noted steps: when it may fit prices anew, and not each one at its end, when caches are
        cold.
        """
        for batch, seconds, cores, passed_s in self._noted:
            self._fit.note(work_of(batch), seconds, cores=cores, passed_s=passed_s)
        self._noted.clear()
        self._noted_s = self._fit.unfitted_s

    def _note_each(self, batch: Batch, seconds: FloatArray, cores: float) -> None:
        """Learn from several decode steps in one as if they had returned one by one.

        Each step reads the tokens that the one before it added. A new worker learns from each step that it would note;
        later it learns only from those that it would keep.
        """
        self.take_in()
        num_rows, context = batch.rows.size, int(batch.ends.sum(dtype=np.int64))
        ended_s = np.cumsum(seconds)
        begun_s = ended_s - seconds

        def note(at: int) -> None:
            work = StepWork(num_rows, context + at * num_rows)
            passed_s = self._passed_s + float(ended_s[at])
            self._fit.note(work, float(seconds[at]), cores=cores, passed_s=passed_s)
            self._unnoted_s, self._passed_s = -float(begun_s[at]), -float(ended_s[at])

        def due(period_s: float) -> int:
            return int(np.searchsorted(begun_s, period_s - self._unnoted_s))

        while self._fit.is_new and (at := due(FIRST_PERIOD_S)) < len(seconds):
            note(at)
        later: list[int] = []
        at = due(NOTE_PERIOD_S)
        while at < len(seconds) and not self._fit.is_new:
            later.append(at)
            at = int(np.searchsorted(begun_s, begun_s[at] + NOTE_PERIOD_S))
        for at in later[-STEPS_OF_KIND:]:
            note(at)
        self._unnoted_s += float(ended_s[-1])
        self._passed_s += float(ended_s[-1])
        self._noted_s = self._fit.unfitted_s


def work_of(batch: Batch) -> StepWork:
    """What a step computes. A row with one known token counts as one that decodes, whatever the token is."""
    return StepWork(*row_passes.work_of(batch.num_scheduled_tokens, batch.num_samples, batch.ends))
