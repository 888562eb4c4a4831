"""Times an engine's steps as they return, and fits a model of what steps take to them. Free of torch."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.contract.step_time import (
    COMPUTE_CORE_GAIN,
    FIRST_CORE_GAIN,
    UNKNOWN_STEP_TIME,
    StepTimeModel,
    StepWork,
    core_speed,
)
from engine.scheduler.requests import row_passes
from engine.scheduler.step_draft import Batch, StepInFlight

FloatArray: TypeAlias = NDArray[np.float64]
Kind: TypeAlias = tuple[int, int, int, int, int]

EARLY_FIT_STEPS: Final = (3, 6, 12, 24)
"""Prices are fitted anew behind so many steps: a worker that starts is known soon, and better known soon after."""

FIT_PERIOD_S: Final = 1.0
"""Time in steps between two fits: a load report that changes is written anew for every router."""

MAX_KINDS: Final = 96
STEPS_OF_KIND: Final = 8
"""So many steps are kept of so many kinds, those that were seen last."""

HALF_LIFE_STEPS: Final = 64.0
MIN_WEIGHT: Final = 1e-3
"""A step counts half as much after so many others, and never less than this: nothing newer may tell of its kind."""

NUM_PASSES: Final = 4
TOLERANCE: Final = 1.345
MIN_SPREAD: Final = 0.02
"""Steps that are off by more than ``TOLERANCE`` times the usual count in inverse proportion; see Huber, 1964."""

DEVIATIONS_OF_MEDIAN: Final = 1.4826
"""Of normally distributed errors: their standard deviation by the median of their sizes."""

RIDGE: Final = 1e-5
EARLY_RIDGE: Final = 0.1
"""How much small prices are preferred: it decides where the steps leave open what costs how much. The latter is divided
by the square of their number: a few steps fit many prices, and none that is far from the others is to be believed.
"""

ERROR_DECAY: Final = 1 / 64
CLOCK_TICK_S: Final = 1e-9

CORE_GAINS: Final = np.linspace(0.025, 1.0, 40)
"""Of these the gain of cores is the one that explains best how much faster steps were on more. None is 0, which says
that a worker takes no cores of others.
"""
FIRST_GAIN_STEPS: Final = 4.0

_SUBSETS: Final = np.array([[subset >> index & 1 for index in range(5)] for subset in range(32)], float)
IS_READING: Final = np.array([1.0, 0.0, 0.0, 0.0, 0.0])
"""1.0 for what every step reads, the weights, in the order of the prices: cores gain less there."""

_ALIKE: Final = ((1, 3), (2, 4))
"""Tokens of answers and of prompts, and what either reads."""

NOTE_PERIOD_S: Final = 0.05
FIRST_PERIOD_S: Final = 0.001
"""Of steps that are shorter, one in so much time is learnt from: noting one takes some ten microseconds. The latter
holds for steps with prompts, and for all of a worker that has made few.
"""


class StepTimeFit:
    """The newest steps of each kind, and the prices that fit them best.

    Steps of about the same work are of one kind, and each kind keeps its own: hours of decoding do not push out what
    is known of prompts. What a step is off counts as a share of its time, and steps that something else delayed count
    less. A token of a prompt is taken to cost what one of an answer does, and what it reads likewise, while only one of
    the two was seen. The prices change once a second.

    Steps on more cores than the worker's own count as what they would have taken on these: how much faster they are is
    learnt from steps of the same kind on more and on fewer. The model has the prices on as many as there were lately.
    """

    def __init__(self) -> None:
        self.model: StepTimeModel = UNKNOWN_STEP_TIME
        self._kinds: OrderedDict[Kind, deque[tuple[float, ...]]] = OrderedDict()
        self._num_steps = 0
        self._next_fit_steps: float = EARLY_FIT_STEPS[0]
        self._has_prompts = False
        self._num_predicted = 0
        self._error = 0.0
        self._unfitted_s = self._noted_s = self._core_seconds = 0.0

    @property
    def is_new(self) -> bool:
        """True while few steps were seen: each of them tells much."""
        return self._num_steps < EARLY_FIT_STEPS[-1]

    def note(self, work: StepWork, seconds: float, *, cores: float = 1.0, passed_s: float = 0.0) -> None:
        """Take in what a step took on ``cores`` times the worker's own cores.

        passed_s: what this step and those before it took that were not noted, if it is longer.
        """
        seconds = max(seconds, CLOCK_TICK_S)
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
        self._num_steps += 1
        steps.append((1.0, *work, seconds, self._num_steps, cores))
        self._unfitted_s += max(passed_s, seconds)
        self._noted_s += seconds
        self._core_seconds += cores * seconds
        if work.num_prompt_tokens and not self._has_prompts:
            self._has_prompts, self._next_fit_steps = True, max(self._num_steps, EARLY_FIT_STEPS[0])
        if self._num_steps >= self._next_fit_steps or (self.model.num_steps and self._unfitted_s >= FIT_PERIOD_S):
            cores = self._core_seconds / self._noted_s
            self._unfitted_s = self._noted_s = self._core_seconds = 0.0
            self._next_fit_steps = next((n for n in EARLY_FIT_STEPS if n > self._num_steps), math.inf)
            self.model = self._fitted(cores)

    def _note_error(self, predicted_s: float, seconds: float) -> None:
        self._num_predicted += 1
        weight = max(ERROR_DECAY, 1 / self._num_predicted)
        self._error += weight * (abs(predicted_s - seconds) / max(predicted_s, seconds) - self._error)

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
            num_steps=self._num_steps,
            core_gain=gain,
        )
        return model.on(cores)

    def _core_gain(self, step_cores: FloatArray) -> float | None:
        """The gain of cores, by decode steps of a kind that were seen on more and on fewer; None: all on its own.

        What requests add gains ``COMPUTE_CORE_GAIN``: steps of many of them tell little of the rest.
        ``FIRST_CORE_GAIN`` counts as much as ``FIRST_GAIN_STEPS`` of them: a few that others disturbed say little.
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
        """Of steps of a kind, by medians."""
        prices, shares, computing = self.model.on(1.0), [], []
        for step in kept:
            work = StepWork(*step[1:5])
            predicted_s = max(prices.seconds(work), CLOCK_TICK_S) if prices.num_steps else 1.0
            shares.append(step[5] / predicted_s)
            computing.append(1.0 - prices.base_s / predicted_s if prices.num_steps else 0.0)
        num_steps = sum(0.5 ** ((self._num_steps - step[6]) / HALF_LIFE_STEPS) for step in kept)
        return _Pace(median(step[7] for step in kept), median(shares), median(computing), num_steps)


class _Pace(NamedTuple):
    """Steps of a kind: the cores that they had, what they took as a share of what is predicted on a worker's own, how
    much of that is computing, and how many there are, of which older ones count less."""

    cores: float
    time: float
    computing: float
    num_steps: float

    def times(self) -> FloatArray:
        """The time that is expected for each gain of cores, as a share of that on a worker's own."""
        reading = (1.0 - self.computing) / (1.0 + CORE_GAINS * (self.cores - 1.0))
        times: FloatArray = reading + self.computing / core_speed(self.cores, COMPUTE_CORE_GAIN)
        return times


def robust_prices(work: FloatArray, seconds: FloatArray, weights: FloatArray) -> FloatArray:
    """Prices, none negative, whose sums come nearest to ``seconds``, as shares of these.

    work: [num_steps, 5] 1 and what each step computed; the others are [num_steps].
    """
    trust, expected = np.ones_like(seconds), seconds
    prices = np.zeros(work.shape[1])
    for _ in range(NUM_PASSES):
        prices = _nearest_prices(work, seconds, weights * trust, expected)
        predicted = work @ prices
        expected = np.maximum(predicted, seconds / 10)
        off = np.abs(seconds - predicted) / expected
        if off.max() <= TOLERANCE * MIN_SPREAD:  # all of them count in full, and come out as they are
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
    """The nonnegative x with the smallest x' gram x - 2 goal' x: of all ways to leave some of it 0, the best."""
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
    """Steps are alike whose rows, context, and tokens of prompts are within a factor of 2, and what these read of 4, on
    the same number of cores."""
    rows, context, tokens, reads = work
    return (
        int(rows).bit_length(),
        int(context).bit_length(),
        int(tokens).bit_length(),
        int(reads).bit_length() + 1 >> 1,
        round(cores),
    )


class StepTimer:
    """The clock of steps, and the model fitted to them.

    A step that was scheduled behind another begins when that one returns. Of short steps the one after the period is
    noted, and not the one that ends it, which is more often one that something delayed.
    """

    def __init__(self, *, clock: Callable[[], float], fit: StepTimeFit | None = None) -> None:
        self._clock = clock
        self._fit = fit or StepTimeFit()
        self._returned_s = -math.inf
        self._cores = 1.0
        self._unnoted_s = FIRST_PERIOD_S
        self._passed_s = 0.0

    @property
    def model(self) -> StepTimeModel:
        """What a step takes by what it computes, as far as is known."""
        return self._fit.model

    @property
    def model_now(self) -> StepTimeModel:
        """The same, on as many cores as the last step had."""
        return self._fit.model.on(self._cores)

    def now_s(self) -> float:
        """The time at which a step is scheduled."""
        return self._clock()

    @property
    def returned_s(self) -> float:
        """The time at which the last step returned."""
        return self._returned_s

    def step_returned(self, step: StepInFlight, *, cores: float = 1.0, ends_s: Sequence[float] | None = None) -> float:
        """Take note of a step on ``cores`` times the worker's own cores; returns the seconds that it took.

        ends_s: of several decode steps in one, when each of them ended; None: nothing is learnt from those.
        """
        now_s = self._clock()
        begun_s = max(step.scheduled_s, self._returned_s)
        seconds = now_s - begun_s
        self._returned_s, self._cores = now_s, cores
        if ends_s is not None:
            self._note_each(step.batch, np.diff(ends_s, prepend=begun_s), cores)
            return seconds
        period_s = FIRST_PERIOD_S if self._fit.is_new or step.batch.has_prompts else NOTE_PERIOD_S
        if self._unnoted_s >= period_s and not step.batch.decodes_often:
            self._fit.note(work_of(step.batch), seconds, cores=cores, passed_s=self._passed_s + seconds)
            self._unnoted_s, self._passed_s = 0.0, -seconds
        self._unnoted_s += seconds
        self._passed_s += seconds
        return seconds

    def _note_each(self, batch: Batch, seconds: FloatArray, cores: float) -> None:
        """Learn from several decode steps in one as if they had returned one by one: of a new worker's from each that
        would be noted, later from those of them that would be kept. Each reads what the one before it added.
        """
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


def work_of(batch: Batch) -> StepWork:
    """What a step computes. A row with one known token counts as one that decodes, whatever the token is."""
    return StepWork(*row_passes.work_of(batch.num_scheduled_tokens, batch.num_samples, batch.ends))
