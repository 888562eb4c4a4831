"""Fits a model of step times to an engine's own steps. Free of torch."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from statistics import median
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.contract.step_time import (
    COMPUTE_CORE_GAIN,
    FIRST_CORE_GAIN,
    LEAST_DELAY,
    UNKNOWN_STEP_TIME,
    StepTimeModel,
    StepWork,
    core_speed,
)

FloatArray: TypeAlias = NDArray[np.float64]
Kind: TypeAlias = tuple[int, int, int, int, int]

EARLY_FIT_STEPS: Final = (3, 6, 12, 24)
"""Prices are fitted after this many steps of a new worker: they are soon known roughly, and then better. They are also
fitted after each of its first steps with prompts, as many as the last of these numbers: the next prompt may be several
times as long.
"""

FIT_PERIOD_S: Final = 1.0
"""Step time between two fits: each new fit changes the load report, which is then written anew for every router."""

MAX_KINDS: Final = 96
STEPS_OF_KIND: Final = 8
"""This many steps are kept of each kind, for the ``MAX_KINDS`` kinds seen last."""

HALF_LIFE_STEPS: Final = 64.0
MIN_WEIGHT: Final = 1e-3
"""A step's weight halves every ``HALF_LIFE_STEPS`` steps, down to this: it may be the newest of its kind."""

NUM_PASSES: Final = 4
TOLERANCE: Final = 1.345
MIN_SPREAD: Final = 0.02
"""Steps whose error exceeds ``TOLERANCE`` times the usual one count in inverse proportion to it; see Huber, 1964."""

DEVIATIONS_OF_MEDIAN: Final = 1.4826
"""The ratio of standard deviation to median size, for normally distributed errors."""

RIDGE: Final = 1e-5
EARLY_RIDGE: Final = 0.1
"""Regularisation: prefers small prices where the steps do not determine them. ``EARLY_RIDGE`` is divided by the square
of the number of steps: few steps fit many prices, and none far from the others should be believed.
"""

ERROR_DECAY: Final = 1 / 64
DELAY_DECAY: Final = 1 / 1024
"""Averages of errors and delays change by these shares with each step. Delays are rare: they are remembered longer."""

UNSEEN_STEPS: Final = 64
"""As if so many steps without delay had been seen before: a few steps tell little of what is rare."""

MOST_DELAY: Final = 2.0
"""A longer delay counts as this one: such a step rather tells that its work was not known."""

CLOCK_TICK_S: Final = 1e-9

CORE_GAINS: Final = np.linspace(0.025, 1.0, 40)
"""Candidates for the gain of cores; the one that best explains the speed on more cores is taken. 0 is not among them:
it says that a worker borrows no cores.
"""
FIRST_GAIN_STEPS: Final = 4.0

_SUBSETS: Final = np.array([[subset >> index & 1 for index in range(5)] for subset in range(32)], float)
IS_READING: Final = np.array([1.0, 0.0, 0.0, 0.0, 0.0])
"""1.0 for the price of reading the weights, which every step does; more cores help less there."""

_ALIKE: Final = ((1, 3), (2, 4))
"""Pairs of prices that are alike: per token of answers and of prompts, and per token that these read."""


class StepTimeFit:
    """The newest steps of each kind, and the prices that fit them best.

    Steps of similar work are one kind. Each kind keeps its own steps, so hours of decoding do not push out what is
    known of prompts. Errors are relative to a step's time, and steps that something else delayed count less. While only
    answers or only prompts were seen, a token of the other is assumed to cost the same, and so is a token that it
    reads. Prices change once a second of steps, sooner while they are new.

    Steps that ran on more cores than the worker's own count with the time that they would have taken on these. How much
    faster more cores are is learnt from steps of the same kind on more and on fewer cores. The model's prices are those
    on the recent number of cores.
    """

    def __init__(self) -> None:
        self.model: StepTimeModel = UNKNOWN_STEP_TIME
        self.is_new = True
        """True while few steps were seen, so that each one tells much."""
        self.most_prompt_tokens = 0.0
        """The most prompt tokens of a step so far: what steps with many more take is a guess."""
        self._kinds: OrderedDict[Kind, deque[tuple[float, ...]]] = OrderedDict()
        self._num_steps = self._num_prompt_steps = 0
        self._num_predicted = 0
        self._error = self._delayed = self._delay = 0.0
        self._unfitted: list[tuple[StepWork, float, int, float]] = []
        self.unfitted_s = 0.0
        """Step time since the last fit; with ``FIT_PERIOD_S`` prices are fitted again."""

    def note(self, work: StepWork, seconds: float, *, cores: float = 1.0, passed_s: float = 0.0) -> None:
        """Take in the time of a step on ``cores`` times the worker's own cores.

        passed_s: the total time of this step and of the steps before it that were not noted, if that is longer.
        """
        self._num_steps += 1
        self.is_new = self._num_steps < EARLY_FIT_STEPS[-1]
        seconds = seconds if seconds > CLOCK_TICK_S else CLOCK_TICK_S
        self._unfitted.append((work, seconds, self._num_steps, cores))
        self.unfitted_s += passed_s if passed_s > seconds else seconds
        self._num_prompt_steps += work.num_prompt_tokens > 0
        if work.num_prompt_tokens > self.most_prompt_tokens:
            self.most_prompt_tokens = work.num_prompt_tokens
        if self._is_due(has_prompts=work.num_prompt_tokens > 0):
            core_seconds = sum(cores * seconds for _, seconds, _, cores in self._unfitted)
            mean_cores = core_seconds / sum(seconds for _, seconds, *_ in self._unfitted)
            self._take_in()
            self.unfitted_s = 0.0
            self.model = self._fitted(mean_cores)

    def _take_in(self) -> None:
        """Sort the new steps by kind, and compare them with what was predicted: not one by one, in caches that the
        model left cold.
        """
        for work, seconds, number, cores in self._unfitted:
            if self.model.num_steps:
                self._note_error(self.model.on(cores).seconds(work), seconds)
            kind = _kind_of(work, cores)
            steps = self._kinds.get(kind)
            if steps is None:
                steps = self._kinds[kind] = deque(maxlen=STEPS_OF_KIND)
                if len(self._kinds) > MAX_KINDS:
                    self._kinds.popitem(last=False)
            else:
                self._kinds.move_to_end(kind)
            steps.append((1.0, *work, seconds, number, cores))
        self._unfitted.clear()

    def _is_due(self, *, has_prompts: bool) -> bool:
        """True when prices are to be fitted after this step."""
        if self._num_steps in EARLY_FIT_STEPS:
            return True
        if not self.model.num_steps:
            return False
        is_early = has_prompts and self._num_prompt_steps <= EARLY_FIT_STEPS[-1]
        return is_early or self.unfitted_s >= FIT_PERIOD_S

    def _note_error(self, predicted_s: float, seconds: float) -> None:
        self._num_predicted += 1
        weight = max(ERROR_DECAY, 1 / self._num_predicted)
        self._error += weight * (abs(predicted_s - seconds) / max(predicted_s, seconds) - self._error)
        num_known = self._num_predicted - EARLY_FIT_STEPS[-1]
        if num_known > 0:
            delay = min(seconds / max(predicted_s, CLOCK_TICK_S) - 1.0, MOST_DELAY)
            is_delayed, weight = delay > LEAST_DELAY, max(DELAY_DECAY, 1 / (num_known + UNSEEN_STEPS))
            self._delayed += weight * (is_delayed - self._delayed)
            self._delay += weight * (is_delayed * delay - self._delay)

    def _fitted(self, cores: float) -> StepTimeModel:
        steps = np.array([step for kept in self._kinds.values() for step in kept])
        work, ages, step_cores = steps[:, :5], self._num_steps - steps[:, 6], steps[:, 7]
        weights = np.maximum(0.5 ** (ages / HALF_LIFE_STEPS), MIN_WEIGHT)
        gain = self._core_gain(step_cores)
        more = np.maximum(step_cores - 1.0, 0.0)[:, None]
        on_own = work / (1.0 + (gain or 0.0) * more * IS_READING + COMPUTE_CORE_GAIN * more * (1.0 - IS_READING))
        base_s, row_s, context_token_s, prompt_token_s, prompt_read_s = robust_prices(
            on_own, steps[:, 5], weights
        ).tolist()
        model = StepTimeModel(
            base_s=base_s,
            row_s=row_s,
            context_token_s=context_token_s,
            prompt_token_s=prompt_token_s,
            prompt_read_s=prompt_read_s,
            error=float(self._error) if self._num_predicted else 1.0,
            delayed=float(self._delayed),
            delay=float(self._delay / self._delayed) if self._delayed else 0.0,
            num_steps=self._num_steps,
            core_gain=gain,
            most_rows=float(steps[:, 1].max()),
        )
        return model.on(cores)

    def _core_gain(self, step_cores: FloatArray) -> float | None:
        """The gain of cores, from decode steps of one kind on more and on fewer cores; None: all ran on the worker's
        own.

        The work of requests gains ``COMPUTE_CORE_GAIN``, so steps with many requests tell little about the rest.
        ``FIRST_CORE_GAIN`` weighs as much as ``FIRST_GAIN_STEPS`` steps: a few disturbed steps must not decide.
        """
        if step_cores.max() <= 1.0:
            return self.model.core_gain
        of_work: dict[tuple[int, ...], list[_Pace]] = {}
        for kind, kept in self._kinds.items():
            if not kind[2]:
                of_work.setdefault(kind[:4], []).append(self._pace(kept))
        off = FIRST_GAIN_STEPS * np.log((1.0 + CORE_GAINS) / (1.0 + FIRST_CORE_GAIN)) ** 2
        for paces in of_work.values():
            least, most = min(paces), max(paces)
            if most.cores > least.cores:
                expected = least.times() / most.times()
                seen = min(max(least.time / most.time, expected.min()), expected.max())
                off += min(least.num_steps, most.num_steps) * np.log(expected / seen) ** 2
        return float(CORE_GAINS[int(np.argmin(off))])

    def _pace(self, kept: Sequence[tuple[float, ...]]) -> _Pace:
        """Summarise the steps of one kind, by medians."""
        prices, shares, computing = self.model.on(1.0), [], []
        for step in kept:
            work = StepWork(*step[1:5])
            predicted_s = max(prices.seconds(work), CLOCK_TICK_S) if prices.num_steps else 1.0
            shares.append(step[5] / predicted_s)
            computing.append(1.0 - prices.base_s / predicted_s if prices.num_steps else 0.0)
        num_steps = sum(0.5 ** ((self._num_steps - step[6]) / HALF_LIFE_STEPS) for step in kept)
        return _Pace(median(step[7] for step in kept), median(shares), median(computing), num_steps)


class _Pace(NamedTuple):
    """A summary of one kind's steps: their cores, their time relative to the prediction on the worker's own cores, the
    share of computing in it, and their number, in which older steps count less.
    """

    cores: float
    time: float
    computing: float
    num_steps: float

    def times(self) -> FloatArray:
        """The expected time for each candidate gain, relative to the time on the worker's own cores."""
        reading = (1.0 - self.computing) / (1.0 + CORE_GAINS * (self.cores - 1.0))
        times: FloatArray = reading + self.computing / core_speed(self.cores, COMPUTE_CORE_GAIN)
        return times


def robust_prices(work: FloatArray, seconds: FloatArray, weights: FloatArray) -> FloatArray:
    """Nonnegative prices whose sums come closest to ``seconds``, by relative error.

    work: [num_steps, 5] 1 and what each step computed; the other arguments are [num_steps].
    """
    trust, expected = np.ones_like(seconds), seconds
    prices = np.zeros(work.shape[1])
    for _ in range(NUM_PASSES):
        prices = _nearest_prices(work, seconds, weights * trust, expected)
        predicted = work @ prices
        expected = np.maximum(predicted, seconds / 10)
        off = np.abs(seconds - predicted) / expected
        if off.max() <= TOLERANCE * MIN_SPREAD:  # every step counts in full: the result is final
            break
        usual = max(DEVIATIONS_OF_MEDIAN * _median(off, weights), MIN_SPREAD)
        trust = np.minimum(TOLERANCE * usual / np.maximum(off, CLOCK_TICK_S), 1.0)
    return prices


def _nearest_prices(work: FloatArray, seconds: FloatArray, weights: FloatArray, expected: FloatArray) -> FloatArray:
    """One weighted least-squares fit of all prices."""
    shares = weights / weights.sum()
    relative = work / expected[:, None]
    sizes = np.sqrt(shares @ relative**2)
    sizes[sizes == 0.0] = 1.0
    scaled = relative / sizes
    gram = (scaled * shares[:, None]).T @ scaled + (RIDGE + EARLY_RIDGE / len(seconds) ** 2) * np.eye(sizes.size)
    prices: FloatArray = _least_squares(gram, scaled.T @ (shares * seconds / expected)) / sizes
    for one, other in _ALIKE:
        if not work[:, one].any():
            prices[one] = prices[other]
        elif not work[:, other].any():
            prices[other] = prices[one]
    return prices


def _least_squares(gram: FloatArray, goal: FloatArray) -> FloatArray:
    """The nonnegative x that minimises x' gram x - 2 goal' x, found by trying every subset of entries that are 0."""
    grams = gram * _SUBSETS[:, :, None] * _SUBSETS[:, None, :] + np.eye(goal.size) * (1.0 - _SUBSETS)[:, None, :]
    found = np.linalg.solve(grams, (goal * _SUBSETS)[:, :, None])[:, :, 0]
    losses = np.einsum("si,ij,sj->s", found, gram, found) - 2.0 * found @ goal
    losses[(found < 0.0).any(axis=1)] = np.inf
    best: FloatArray = found[int(np.argmin(losses))]
    return best


def _median(values: FloatArray, weights: FloatArray) -> float:
    order = np.argsort(values)
    passed = np.cumsum(weights[order])
    return float(values[order[int(np.searchsorted(passed, passed[-1] / 2))]])


def _kind_of(work: StepWork, cores: float) -> Kind:
    """Steps are of one kind if their rows, context and prompt tokens are within a factor of 2, what these prompt tokens
    read within a factor of 4, and their numbers of cores equal.
    """
    rows, context, tokens, reads = work
    return (
        int(rows).bit_length(),
        int(context).bit_length(),
        int(tokens).bit_length(),
        int(reads).bit_length() + 1 >> 1,
        round(cores),
    )
