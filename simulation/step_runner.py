"""Steps that take the time a model predicts for them, and compute nothing."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from engine.contract.step import ModelRunnerOutput, SchedulerOutput
from engine.contract.step_time import StepWork
from simulation.machine import Machine

VOCAB_SIZE = 32_000


class WorkerClock:
    """Time as one worker reads it: the loop's, and within a step as far on as the step is.

    A step is run at once when it begins; what it brings is told to others when the loop's time has come there.
    """

    def __init__(self, loop_time: Callable[[], float]) -> None:
        self._loop_time = loop_time
        self._ahead_s: float | None = None

    def __call__(self) -> float:
        return self._loop_time() if self._ahead_s is None else self._ahead_s

    def go_ahead(self) -> None:
        """A step begins now."""
        self._ahead_s = self._loop_time()

    def pass_time(self, seconds: float) -> None:
        """The step goes on for so long."""
        assert self._ahead_s is not None, "time passes only within a step"
        self._ahead_s += seconds

    def return_to_loop(self) -> float:
        """The step was run; returns when it ends."""
        assert self._ahead_s is not None, "no step began"
        end_s, self._ahead_s = self._ahead_s, None
        return end_s


def work_of(output: SchedulerOutput) -> StepWork:
    """What a step computes, as its time is predicted from."""
    first = output.first_positions
    if output.is_decode:
        return StepWork(num_rows=first.size, num_context_tokens=float(first.sum(dtype=np.int64)))
    counts = output.num_scheduled_tokens
    is_row = (counts == 1) & (output.num_samples == 1)
    prompts, behind = counts[~is_row].astype(np.float64), first[~is_row].astype(np.float64)
    return StepWork(
        num_rows=int(is_row.sum()),
        num_context_tokens=float(first[is_row].sum(dtype=np.int64)),
        num_prompt_tokens=float(prompts.sum()),
        num_prompt_reads=float((prompts * (behind + prompts / 2)).sum()),
    )


class Host:
    """The workers that share cores and memory: how many of them compute now."""

    def __init__(self) -> None:
        self.num_computing = 0


class _LaunchedStep:
    """Implements ``PendingStep``: its time passes when somebody waits for it."""

    def __init__(self, output: ModelRunnerOutput, seconds: float, clock: WorkerClock) -> None:
        self._output = output
        self._seconds = seconds
        self._clock = clock

    def result(self) -> ModelRunnerOutput:
        """Let the step's time pass."""
        self._clock.pass_time(self._seconds)
        return self._output


class VirtualRunner:
    """Implements ``StepRunner``. Tokens depend on their row's seed and on their position alone.

    A step's time is what ``machine`` predicts beside those workers of the ``host`` that compute when it is launched,
    more or less by its noise. ``busy_s`` is the time of all steps so far, ``busy_in_s`` that of those which began in a
    second of the clock.
    """

    def __init__(self, machine: Machine, clock: WorkerClock, *, host: Host, max_num_seqs: int, seed: int = 0) -> None:
        self.busy_s = 0.0
        self.busy_in_s: defaultdict[int, float] = defaultdict(float)
        self._machine = machine
        self._clock = clock
        self._host = host
        self._noise = machine.step_noise
        self._random = random.Random(seed)
        self._seeds = np.zeros(max_num_seqs, dtype=np.int64)

    def launch(self, output: SchedulerOutput) -> _LaunchedStep:
        """Know the step's tokens and its time."""
        for new_row in output.new_rows:
            self._seeds[new_row.row] = new_row.sampling.seed % VOCAB_SIZE
        if not output.has_work:
            return _LaunchedStep(ModelRunnerOutput(sampled_token_ids=np.empty(0, np.int32)), 0.0, self._clock)
        seconds = self._machine.step_time_beside(self._host.num_computing).seconds(work_of(output))
        if self._noise:
            seconds *= math.exp(self._random.gauss(-self._noise * self._noise / 2, self._noise))
        self.busy_s += seconds
        self.busy_in_s[int(self._clock())] += seconds
        return _LaunchedStep(ModelRunnerOutput(sampled_token_ids=self._tokens(output)), seconds, self._clock)

    def _tokens(self, output: SchedulerOutput) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        samples = output.num_samples > 0
        ends = output.first_positions[samples].astype(np.int64) + output.num_scheduled_tokens[samples]
        tokens: np.ndarray[tuple[int], np.dtype[np.int32]] = (
            (self._seeds[output.rows[samples]] * 7919 + ends) % VOCAB_SIZE
        ).astype(np.int32)
        return tokens
