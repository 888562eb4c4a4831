"""How many draft tokens pay: weighs measured acceptance against measured step times. Free of torch."""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.contract.step import BoolArray, IntArray

FloatArray = NDArray[np.float64]

DECAY = 0.9
"""The weight of a trial, relative to the one after it."""

PRIOR_TRIALS = 2.0
"""The weight, in trials, of the acceptance of all requests in the estimate for one request."""

FIRST_ACCEPTANCE = 0.8
"""Assumed before any draft was verified. Trying corrects a value that is too high, but not one that is too low."""

NUM_TIMES = 5
"""The time of a step size is the median of this many steps, so that an interrupted step does not count."""

CLOCK_TICK_S = 1e-9
"""The least time that a step counts as, whatever the clock says."""

ROWS_PER_REST_STEP = 2
"""When drafts do not pay, nothing is proposed for one step per this many requests."""

STEPS_BEFORE_PROBE = 64
"""After this many steps without drafts, some are verified although they are not expected to pay."""

PROBE_SHARE = 0.02
"""The most time that a probe may add, as a share of the time since the last probe."""

MAX_NUM_KNOWN = 4096
"""How many requests' acceptance is remembered."""


class Acceptance:
    """The chance that a request's next draft is right, given that the drafts before it are.

    A request is judged by its own drafts of the same evidence; until it has some, by those of all requests.
    """

    def __init__(self) -> None:
        self._of_all: dict[int, list[float]] = {}
        self._of_request: OrderedDict[tuple[str, int], list[float]] = OrderedDict()

    def note(self, key: tuple[str, int], *, num_drafts: int, num_accepted: int) -> None:
        """Take in how many drafts of one step were right; drafts after the first wrong one say nothing."""
        own = self._of_request.setdefault(key, [0.0, 0.0])
        self._of_request.move_to_end(key)
        if len(self._of_request) > MAX_NUM_KNOWN:
            self._of_request.popitem(last=False)
        for counts in (own, self._of_all.setdefault(key[1], [0.0, 0.0])):
            counts[0] = counts[0] * DECAY + num_accepted
            counts[1] = counts[1] * DECAY + (num_accepted < num_drafts)

    def of(self, key: tuple[str, int]) -> float:
        """The chance, between 0 and 1."""
        return _share(self._of_request.get(key), _share(self._of_all.get(key[1]), FIRST_ACCEPTANCE))


class StepTimes:
    """Times of steps that only decode, by the number of tokens that they compute.

    unknown_s: the time assumed for all steps before any was measured.
    """

    def __init__(self, *, unknown_s: float = 1.0) -> None:
        self._unknown_s = unknown_s
        self._times: dict[int, deque[float]] = {}
        self._sizes: FloatArray = np.empty(0)
        self._medians: FloatArray = np.empty(0)

    def note(self, num_tokens: int, seconds: float) -> None:
        """Take in one step."""
        times = self._times.setdefault(_class_of(num_tokens), deque(maxlen=NUM_TIMES))
        times.append(max(seconds, CLOCK_TICK_S))
        sizes = sorted(self._times)
        medians = [statistics.median(self._times[size]) for size in sizes]
        self._sizes = np.array([0, *sizes], float)
        self._medians = np.maximum.accumulate(np.array([0.0, *medians]))

    def of(self, num_tokens: IntArray) -> FloatArray:
        """Seconds of steps of these sizes: interpolated between measured sizes.

        A size that was never tried is assumed to be cheap, so that it gets tried. Larger steps cost what the largest
        measured one does; smaller ones a proportional share of the smallest. Before any measurement all cost the same.
        """
        if self._sizes.size == 0:
            return np.full(num_tokens.size, self._unknown_s)
        return np.interp(num_tokens, self._sizes, self._medians)


@dataclass(slots=True)
class DraftingTime:
    """How many steps the draft model made: the most drafts of any one request; 0 when it only caught up."""

    num_steps: int = 0


class DraftLengths:
    """Chooses the number of drafts with the highest expected output per second; none where no number pays.

    The likeliest drafts are chosen first. A request's next draft is right with the chance that its drafts had lately,
    the one after it with that chance squared, and so on. While no drafts pay, some are verified from time to time to
    notice a change. With many requests nothing is proposed for a while, because proposing takes time too.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._acceptance = Acceptance()
        self._times = StepTimes()
        self._draft_times = StepTimes(unknown_s=0.0)
        self._evidence: dict[str, int] = {}
        self._steps_without = 0
        self._rest_steps = 0
        self._rest_rows = 0

    def rests(self, num_rows: int) -> bool:
        """True when a step of ``num_rows`` requests needs no proposals, because drafts did not pay with as many."""
        if not self.is_at_rest(num_rows):
            return False
        self._rest_steps -= 1
        self._steps_without += 1
        return True

    def is_at_rest(self, num_rows: int) -> bool:
        """True when ``rests`` would return True now."""
        return self._rest_steps > 0 and num_rows >= self._rest_rows

    def choose(
        self,
        keys: Sequence[tuple[str, int]],
        counts: IntArray,
        *,
        num_tokens: int,
        num_rows: int,
        is_by_model: BoolArray | None = None,
    ) -> IntArray:
        """How many of its drafts each of these requests should have in the step.

        keys: [num_requests] the request's id, and the evidence of its drafts.
        counts: [num_requests] how many drafts there are.
        num_tokens: what the step computes without drafts, which gives ``num_rows`` requests a token each.
        is_by_model: [num_requests] True where a draft model must still be asked, which takes time for each draft.
        """
        total = int(counts.sum())
        if total == 0:
            return counts
        owners = np.repeat(np.arange(counts.size), counts)
        place = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        chance = np.array([self._acceptance.of(key) for key in keys])
        gains = chance[owners] ** (place + 1)
        best_first = np.argsort(-gains, kind="stable")
        output = num_rows + np.concatenate(([0.0], np.cumsum(gains[best_first])))
        step_times = self._times.of(np.arange(num_tokens, num_tokens + total + 1, dtype=np.int32))
        draft_s = np.zeros(counts.size)
        if is_by_model is not None and is_by_model.any():
            draft_s[is_by_model] = self._draft_times.of(np.array([np.count_nonzero(is_by_model)], np.int32))
        # A draft model makes one step for each draft position, for all requests at once.
        drafting_s = np.maximum.accumulate((draft_s[owners] * (place + 1))[best_first])
        num_chosen = int(np.argmax(output / (step_times + np.concatenate(([0.0], drafting_s)))))
        if num_chosen:
            chosen = np.bincount(owners[best_first[:num_chosen]], minlength=counts.size).astype(np.int32)
        else:
            self._rest_steps, self._rest_rows = num_rows // ROWS_PER_REST_STEP, num_rows
            chosen = self._probe(counts, step_times, draft_s)
        self._steps_without = 0 if chosen.any() else self._steps_without + 1
        self._evidence = dict(keys)
        return chosen

    def _probe(self, counts: IntArray, step_times: FloatArray, draft_s: FloatArray) -> IntArray:
        """Some drafts of one request, if none were verified for a long time."""
        chosen = np.zeros_like(counts)
        if self._steps_without >= STEPS_BEFORE_PROBE:
            longest = int(np.argmax(counts))
            allowed_s = step_times[0] * (1.0 + PROBE_SHARE * STEPS_BEFORE_PROBE)
            times = step_times + draft_s[longest] * np.arange(step_times.size)
            num_allowed = int(np.searchsorted(times, allowed_s, side="right")) - 1
            chosen[longest] = min(max(num_allowed, 1), counts[longest])
        return chosen

    @contextmanager
    def drafting(self, num_rows: int) -> Iterator[DraftingTime]:
        """Measure the draft model's time for ``num_rows`` requests; the caller sets the number of steps it made."""
        measured, started_s = DraftingTime(), self._clock()
        yield measured
        if measured.num_steps:
            self._draft_times.note(num_rows, (self._clock() - started_s) / measured.num_steps)

    def note_verified(self, request_id: str, *, num_drafts: int, num_accepted: int) -> None:
        """Learn from a returned step with the drafts chosen last: how many of a request's drafts were right."""
        key = (request_id, self._evidence.get(request_id, 0))
        self._acceptance.note(key, num_drafts=num_drafts, num_accepted=num_accepted)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Learn the time of a step that only decoded while no other step was in flight."""
        self._times.note(num_tokens, seconds)


def _share(counts: Sequence[float] | None, prior: float) -> float:
    right, wrong = counts or (0.0, 0.0)
    return (right + PRIOR_TRIALS * prior) / (right + wrong + PRIOR_TRIALS)


def _class_of(num_tokens: int) -> int:
    """Group steps of similar size: sizes below 16 each by itself, larger ones by eighths of a power of 2."""
    grain = 1 << max(num_tokens.bit_length() - 4, 0)
    return num_tokens // grain * grain
