"""Steps that compute nothing, and take the time that a model predicts for them, with noise."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.contract.executor import LONG_STEP_TOKENS
from engine.contract.messages import LoadReport
from engine.contract.step import IntArray, ModelRunnerOutput, SchedulerOutput
from engine.contract.step_time import LEAST_DELAY, StepWork
from simulation.machine import Machine

NUM_DRAWN = 256
"""How many factors are drawn at a time."""

DELAYS = 1
"""Delays are drawn apart from all else, so that they change nothing of it."""

FloatArray = npt.NDArray[np.float64]

VOCAB_SIZE = 32_000


class StepNoise:
    """Noise factors for step times, with mean 1 but for delays. Their logarithms are normally distributed with the
    standard deviation ``spread``; positive ones are multiplied by ``skew``, and negative ones divided by it.

    A share ``delayed`` of the factors is larger by ``LEAST_DELAY`` or more, ``delay`` on average, exponentially
    distributed: what is longer is the rarer.

    Each step that was made uses one factor, in order, however many were looked at before.
    """

    def __init__(
        self, spread: float, *, skew: float = 1.0, delayed: float = 0.0, delay: float = 0.0, seed: int
    ) -> None:
        self._varies = spread > 0.0 or delayed > 0.0
        self._above, self._below = spread * skew, spread / skew
        self._mean = mean_noise(spread, skew)
        self._delayed, self._longer = delayed, max(delay - LEAST_DELAY, 0.0)
        self._source, self._delays = np.random.default_rng(seed), np.random.default_rng((seed, DELAYS))
        self._waiting: FloatArray = np.empty(0)
        self._at = 0

    def next(self, num_steps: int) -> FloatArray:
        """The factors for the next ``num_steps`` steps. They stay unused until ``use``."""
        if not self._varies:
            return np.ones(num_steps)
        num_lacking = self._at + num_steps - self._waiting.size
        if num_lacking > 0:
            drawn = self._source.standard_normal(max(num_lacking, NUM_DRAWN))
            factors = np.exp(np.where(drawn > 0.0, self._above, self._below) * drawn) / self._mean
            if self._delayed:
                share = (1.0 - self._delays.random(drawn.size)) / self._delayed  # uniform up to 1 where delayed
                factors += np.where(share < 1.0, LEAST_DELAY - self._longer * np.log(share), 0.0)
            self._waiting, self._at = np.concatenate((self._waiting[self._at :], factors)), 0
        return self._waiting[self._at : self._at + num_steps]

    def use(self, num_steps: int) -> None:
        """Consume the factors of ``num_steps`` steps that were made."""
        if self._varies:
            self._at += num_steps


def averaged(factors: FloatArray, seconds: FloatArray, noise_s: float) -> FloatArray:
    """The factors for steps that take so many seconds without noise; see ``Machine.noise_s``."""
    if not noise_s:
        return factors
    closer: FloatArray = 1.0 + (factors - 1.0) * np.sqrt(np.minimum(noise_s / seconds, 1.0))
    return closer


def mean_noise(spread: float, skew: float) -> float:
    """The mean of the factors of ``StepNoise`` if their median is 1."""
    return _half_mean(spread * skew) + _half_mean(-spread / skew)


def _half_mean(spread: float) -> float:
    """The part of the mean of exp(spread * z) that comes from z > 0, for z normally distributed."""
    return math.exp(spread * spread / 2) * (1.0 + math.erf(spread / math.sqrt(2))) / 2


def work_of(output: SchedulerOutput) -> StepWork:
    """The work of a step, from which its time is predicted. For several decode steps in one, the work of the first."""
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
    """A host, whose workers share cores and memory. It counts how many of them compute now. ``address`` is its address
    for routers.

    Each worker reports when its steps begin and end, and when no step follows. ``cut_step`` of the others is called
    when a worker begins or stops computing, because their next steps may then take another time.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.address = address
        self.num_computing = 0
        self._busy: dict[Callable[[], object], bool] = {}

    def join(self, cut_step: Callable[[], object]) -> None:
        """Add a worker, identified by its ``cut_step``."""
        self._busy[cut_step] = False

    def step_begins(self, cut_step: Callable[[], object]) -> None:
        """Note that a worker's step begins."""
        self.num_computing += 1
        self._set_busy(cut_step, is_busy=True)

    def step_ends(self) -> None:
        """Note that a worker's step ended. Another one may follow at once."""
        self.num_computing -= 1

    def rests(self, cut_step: Callable[[], object]) -> None:
        """Note that a worker has nothing to compute."""
        self._set_busy(cut_step, is_busy=False)

    def _set_busy(self, cut_step: Callable[[], object], *, is_busy: bool) -> None:
        if self._busy[cut_step] is is_busy:
            return
        self._busy[cut_step] = is_busy
        for other in self._busy:
            if other != cut_step:
                other()


class StepPrice(NamedTuple):
    """The time of a step, and the cores that it is computed on, as a multiple of the worker's own."""

    seconds: float
    cores: float


class LaunchedStep:
    """Implements ``PendingStep``: one step, or several decode steps in one. ``ends_s`` is when each of them ends.

    Its owner waits for ``end_s`` before it takes the result, which has the tokens of the first ``num_steps`` steps.
    """

    def __init__(self, runner: VirtualRunner, output: SchedulerOutput, begun_s: float, ends_s: Sequence[float]) -> None:
        self._runner = runner
        self.output = output
        self.begun_s = begun_s
        self.ends_s = ends_s
        self.num_steps = len(ends_s)
        self.step_cores: float | None = None

    @property
    def end_s(self) -> float:
        """When the last of its steps ends."""
        return self.ends_s[self.num_steps - 1]

    def cut(self, now_s: float) -> bool:
        """End it with the decode step that runs at ``now_s``. False if that is its last one anyway."""
        num_steps = min(int(np.searchsorted(self.ends_s, now_s, side="left")) + 1, self.num_steps)
        is_shorter, self.num_steps = num_steps < self.num_steps, num_steps
        return is_shorter

    def load_at(self, now_s: float, load: LoadReport, *, block_size: int) -> LoadReport | None:
        """A worker's earlier ``load``, updated for the decode steps that are over by now; None if none is over."""
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


class LongStep(LaunchedStep):
    """A step that gets more or fewer cores on its way, as a real one looks for them between its layers: when another
    worker of the host begins or stops computing, what is left of it takes the time that it then takes.
    """

    def __init__(self, runner: VirtualRunner, output: SchedulerOutput, begun_s: float) -> None:
        self._work = work_of(output)
        self._price = runner.price(self._work)
        self._factor = runner.factor(self._price.seconds)
        super().__init__(runner, output, begun_s, (begun_s + self._price.seconds * self._factor,))
        self._since_s, self._left, self._cores_before = begun_s, 1.0, 0.0
        self.step_cores = self._price.cores

    def cut(self, now_s: float) -> bool:
        """Compute on the cores that the host has now. False if they are as many as before."""
        before, self._price = self._price, self._runner.price(self._work, is_under_way=True)
        if self._price == before:
            return False
        done = min((now_s - self._since_s) / (before.seconds * self._factor), self._left)
        self._cores_before += done * before.cores
        self._since_s, self._left = now_s, self._left - done
        self.ends_s = (now_s + self._left * self._price.seconds * self._factor,)
        self.step_cores = self._cores_before + self._left * self._price.cores
        return True


class VirtualThreads:
    """Implements ``StepThreads``: steps begin on all cores of a host whose other workers compute nothing."""

    def __init__(self, machine: Machine, host: Host) -> None:
        self._machine = machine
        self._host = host
        self.step_cores = 1.0

    def begin_step(self) -> bool:
        """See ``StepThreads``."""
        self.step_cores = self._machine.cores_beside(self._host.num_computing)
        return self.step_cores > 1.0

    def between_layers(self) -> None:
        """Do nothing: a long step follows what the host says."""

    def rest(self) -> None:
        """Do nothing: the owner of the worker tells the host."""

    def close(self) -> None:
        """Nothing to do."""


class VirtualRunner:
    """Implements ``StepRunner``. Tokens depend only on their row's seed and their position.

    A step takes the time that ``machine`` predicts, given the workers of the ``host`` that compute at its launch,
    multiplied by noise. ``busy_s`` is the time of all steps so far, and ``busy_in_s`` that of the steps that began in
    each second of the clock.
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
        self._noise = StepNoise(
            machine.step_noise,
            skew=machine.step_skew,
            delayed=machine.step_delayed,
            delay=machine.step_delay,
            seed=seed,
        )
        self._seeds = np.zeros(max_num_seqs, dtype=np.int64)

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Begin a step and determine when it ends."""
        for new_row in output.new_rows:
            self._seeds[new_row.row] = new_row.sampling.seed % VOCAB_SIZE
        now_s = self._clock()
        if not output.has_work:
            return LaunchedStep(self, output, now_s, (now_s,))
        if output.num_decode_steps == 1 and output.num_tokens >= LONG_STEP_TOKENS:
            self.under_way = LongStep(self, output, now_s)
        else:
            self.under_way = LaunchedStep(self, output, now_s, self._ends_s(output, now_s))
        return self.under_way

    def price(self, work: StepWork, *, is_under_way: bool = False) -> StepPrice:
        """What a step with this work takes without noise, given the workers that compute now; ``is_under_way``: it is
        itself one of those steps.
        """
        num_others = self._host.num_computing - is_under_way
        seconds = self._machine.seconds_beside(num_others, work)
        return StepPrice(seconds, self._machine.cores_beside(num_others))

    def factor(self, seconds: float) -> float:
        """The noise of a step that takes so long without it. It counts as used when the step ends."""
        return float(averaged(self._noise.next(1), np.array([seconds]), self._machine.noise_s)[0])

    def _ends_s(self, output: SchedulerOutput, now_s: float) -> Sequence[float]:
        work = work_of(output)
        num_steps = output.num_decode_steps
        if num_steps == 1:
            one_s = self.price(work).seconds
            return (now_s + one_s * self.factor(one_s),)
        factors = self._noise.next(num_steps)
        model = self._machine.step_time_beside(self._host.num_computing)
        # Each step reads one more token per row. Summed as single steps would do it, so that all digits are equal.
        contexts = work.num_context_tokens + work.num_rows * np.arange(num_steps, dtype=np.float64)
        seconds = model.base_s + model.row_s * work.num_rows + model.context_token_s * contexts
        factors = averaged(factors, seconds, self._machine.noise_s)
        ends_s: list[float] = np.cumsum(np.concatenate(([now_s], seconds * factors)))[1:].tolist()
        return ends_s

    def finish(self, step: LaunchedStep) -> ModelRunnerOutput:
        """The output of a step that is over."""
        output, num_steps = step.output, step.num_steps
        if not output.has_work:
            return ModelRunnerOutput(sampled_token_ids=np.empty(0, np.int32))
        self.under_way = None
        self._noise.use(num_steps)
        self._count(step)
        if output.num_decode_steps == 1:
            return ModelRunnerOutput(sampled_token_ids=self._tokens(output), step_cores=step.step_cores)
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
