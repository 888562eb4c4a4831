"""Steps that take the time a model predicts for them, more or less, and compute nothing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from engine.contract.messages import LoadReport
from engine.contract.step import IntArray, ModelRunnerOutput, SchedulerOutput
from engine.contract.step_time import StepWork
from simulation.machine import Machine

NUM_DRAWN = 256
"""Factors are drawn so many at a time."""

FloatArray = npt.NDArray[np.float64]

VOCAB_SIZE = 32_000


class StepNoise:
    """Factors on the times of steps, with mean 1. Their logarithms are normal ones with the standard deviation
    ``spread``, of which those above 0 are ``skew`` times as large, and those below so many times smaller.

    Each step that was made uses one, in their order, however many were looked at before.
    """

    def __init__(self, spread: float, *, skew: float = 1.0, seed: int) -> None:
        self._spread = spread
        self._above, self._below = spread * skew, spread / skew
        self._mean = _half_mean(self._above) + _half_mean(-self._below)
        self._source = np.random.default_rng(seed)
        self._waiting: FloatArray = np.empty(0)
        self._at = 0

    def next(self, num_steps: int) -> FloatArray:
        """Those of the next steps, if so many are made."""
        if not self._spread:
            return np.ones(num_steps)
        num_lacking = self._at + num_steps - self._waiting.size
        if num_lacking > 0:
            drawn = self._source.standard_normal(max(num_lacking, NUM_DRAWN))
            factors = np.exp(np.where(drawn > 0.0, self._above, self._below) * drawn) / self._mean
            self._waiting, self._at = np.concatenate((self._waiting[self._at :], factors)), 0
        return self._waiting[self._at : self._at + num_steps]

    def use(self, num_steps: int) -> None:
        """So many steps were made."""
        if self._spread:
            self._at += num_steps


def _half_mean(spread: float) -> float:
    """What the mean of exp(spread * z) owes to the z above 0 of a normal one."""
    return math.exp(spread * spread / 2) * (1.0 + math.erf(spread / math.sqrt(2))) / 2


def work_of(output: SchedulerOutput) -> StepWork:
    """What a step computes, as its time is predicted from; of several decode steps in one, what the first does."""
    first = output.first_positions
    if output.is_decode or output.num_decode_steps > 1:
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
    """The workers that share cores and memory: how many of them compute now. ``address``: by which routers know it.

    Each says when a step of its own begins and ends, and when none follows; ``cut_step`` is called when the step after
    the one that goes on may take another time, because another worker began to compute or does so no more.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.address = address
        self.num_computing = 0
        self._busy: dict[Callable[[], object], bool] = {}

    def join(self, cut_step: Callable[[], object]) -> None:
        """A worker is there, by what it is called with."""
        self._busy[cut_step] = False

    def step_begins(self, cut_step: Callable[[], object]) -> None:
        """A worker computes."""
        self.num_computing += 1
        self._set_busy(cut_step, is_busy=True)

    def step_ends(self) -> None:
        """A worker's step is over; another one may follow at once."""
        self.num_computing -= 1

    def rests(self, cut_step: Callable[[], object]) -> None:
        """A worker has nothing to compute."""
        self._set_busy(cut_step, is_busy=False)

    def _set_busy(self, cut_step: Callable[[], object], *, is_busy: bool) -> None:
        if self._busy[cut_step] is is_busy:
            return
        self._busy[cut_step] = is_busy
        for other in self._busy:
            if other != cut_step:
                other()


class LaunchedStep:
    """Implements ``PendingStep``: one step, or several decode steps in one, until ``ends_s``, when each of them ends.

    Its owner waits for ``end_s`` before it takes the result, which has the first ``num_steps`` of them.
    """

    def __init__(self, runner: VirtualRunner, output: SchedulerOutput, begun_s: float, ends_s: Sequence[float]) -> None:
        self._runner = runner
        self.output = output
        self.begun_s = begun_s
        self.ends_s = ends_s
        self.num_steps = len(ends_s)

    @property
    def end_s(self) -> float:
        """When it is over."""
        return self.ends_s[self.num_steps - 1]

    def cut(self, now_s: float) -> bool:
        """Let it end with the decode step that goes on at a time; False where that is its last one anyway."""
        num_steps = min(int(np.searchsorted(self.ends_s, now_s, side="left")) + 1, self.num_steps)
        is_shorter, self.num_steps = num_steps < self.num_steps, num_steps
        return is_shorter

    def load_at(self, now_s: float, load: LoadReport, *, block_size: int) -> LoadReport | None:
        """A worker's load of before, as it is now that some of its decode steps are over; None where none is."""
        num_ended = int(np.searchsorted(self.ends_s, now_s, side="right"))
        if not 0 < num_ended < self.num_steps:
            return None
        before = self.output.first_positions.astype(np.int64) - 1
        num_blocks = int(((before + num_ended) // block_size - before // block_size).sum())
        return replace(
            load,
            num_free_blocks=load.num_free_blocks - num_blocks,
            num_held_blocks=load.num_held_blocks + num_blocks,
            num_context_tokens=load.num_context_tokens + num_ended * self.output.rows.size,
        )

    def result(self) -> ModelRunnerOutput:
        """The tokens of the steps that were made."""
        return self._runner.finish(self)


class VirtualThreads:
    """Implements ``StepThreads``: steps compute on all cores of a host whose other workers compute nothing."""

    def __init__(self, machine: Machine, host: Host) -> None:
        self._machine = machine
        self._host = host
        self.step_cores = 1.0

    def begin_step(self) -> bool:
        """See ``StepThreads``."""
        self.step_cores = self._machine.cores_beside(self._host.num_computing)
        return self.step_cores > 1.0

    def between_layers(self) -> None:
        """A step keeps what it began with."""

    def rest(self) -> None:
        """The host is told by who owns the worker."""

    def close(self) -> None:
        """Nothing to do."""


class VirtualRunner:
    """Implements ``StepRunner``. Tokens depend on their row's seed and on their position alone.

    A step's time is what ``machine`` predicts beside those workers of the ``host`` that compute when it is launched,
    more or less by its noise. ``busy_s`` is the time of all steps so far, ``busy_in_s`` that of those which began in a
    second of the clock.
    """

    def __init__(
        self, machine: Machine, clock: Callable[[], float], *, host: Host, max_num_seqs: int, seed: int = 0
    ) -> None:
        self.busy_s = 0.0
        self.busy_in_s: defaultdict[int, float] = defaultdict(float)
        self.under_way: LaunchedStep | None = None
        self._machine = machine
        self._clock = clock
        self._host = host
        self._noise = StepNoise(machine.step_noise, skew=machine.step_skew, seed=seed)
        self._seeds = np.zeros(max_num_seqs, dtype=np.int64)

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Know the step's time."""
        for new_row in output.new_rows:
            self._seeds[new_row.row] = new_row.sampling.seed % VOCAB_SIZE
        now_s = self._clock()
        if not output.has_work:
            return LaunchedStep(self, output, now_s, (now_s,))
        self.under_way = LaunchedStep(self, output, now_s, self._ends_s(output, now_s))
        return self.under_way

    def _ends_s(self, output: SchedulerOutput, now_s: float) -> Sequence[float]:
        model, work = self._machine.step_time_beside(self._host.num_computing), work_of(output)
        num_steps = output.num_decode_steps
        factors = self._noise.next(num_steps)
        if num_steps == 1:
            return (now_s + model.seconds(work) * float(factors[0]),)
        # As single steps would add it up, to the last digit: what the rows read grows by a token each.
        contexts = work.num_context_tokens + work.num_rows * np.arange(num_steps, dtype=np.float64)
        seconds = model.base_s + model.row_s * work.num_rows + model.context_token_s * contexts
        ends_s: list[float] = np.cumsum(np.concatenate(([now_s], seconds * factors)))[1:].tolist()
        return ends_s

    def finish(self, step: LaunchedStep) -> ModelRunnerOutput:
        """What a step brings that is over."""
        output, num_steps = step.output, step.num_steps
        if not output.has_work:
            return ModelRunnerOutput(sampled_token_ids=np.empty(0, np.int32))
        self.under_way = None
        self._noise.use(num_steps)
        self._count(step)
        if output.num_decode_steps == 1:
            return ModelRunnerOutput(sampled_token_ids=self._tokens(output))
        num_rows = output.rows.size
        positions = output.first_positions.astype(np.int64)[:, None] + np.arange(1, output.num_decode_steps + 1)
        return ModelRunnerOutput(
            sampled_token_ids=self._drawn(output.rows[:, None], positions).reshape(-1),
            num_accepted=np.full(num_rows, num_steps - 1, np.int32),
            step_ends_s=step.ends_s[:num_steps],
        )

    def _count(self, step: LaunchedStep) -> None:
        begun_s = step.begun_s
        for end_s in step.ends_s[: step.num_steps]:
            self.busy_in_s[int(begun_s)] += end_s - begun_s
            begun_s = end_s
        self.busy_s += step.end_s - step.begun_s

    def _tokens(self, output: SchedulerOutput) -> IntArray:
        samples = output.num_samples > 0
        ends = output.first_positions[samples].astype(np.int64) + output.num_scheduled_tokens[samples]
        return self._drawn(output.rows[samples], ends)

    def _drawn(self, rows: IntArray, positions: npt.NDArray[np.int64]) -> IntArray:
        tokens: IntArray = ((self._seeds[rows] * 7919 + positions) % VOCAB_SIZE).astype(np.int32)
        return tokens
