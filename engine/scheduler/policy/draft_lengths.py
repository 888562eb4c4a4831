"""How many draft tokens pay: measured acceptance against measured step times. Free of torch."""

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
"""What an older trial counts beside the next one."""

PRIOR_TRIALS = 2.0
"""So much weighs what is known of all requests, beside what is known of one."""

FIRST_ACCEPTANCE = 0.8
"""Assumed until drafts were verified: too high is found out by trying, too low never."""

NUM_TIMES = 5
"""Steps of one size whose median is its time: one that was interrupted does not count."""

CLOCK_TICK_S = 1e-9
"""No step takes less, whatever the clock says."""

ROWS_PER_REST_STEP = 2
"""Once drafts did not pay, nothing is proposed for one step for each so many requests."""

STEPS_BEFORE_PROBE = 64
"""Without any drafts; then some are verified although they are not expected to pay."""

PROBE_SHARE = 0.02
"""Of the time since the last probe, so much may be spent on one."""

MAX_NUM_KNOWN = 4096
"""Requests whose acceptance is remembered."""


class Acceptance:
    """The chance that the next draft of a request is right, if those before it are.

    A request is judged by its own drafts with the same evidence; until there are some, by those of all requests.
    """

    def __init__(self) -> None:
        self._of_all: dict[int, list[float]] = {}
        self._of_request: OrderedDict[tuple[str, int], list[float]] = OrderedDict()

    def note(self, key: tuple[str, int], *, num_drafts: int, num_accepted: int) -> None:
        """Take in how many drafts of one step were right; the ones behind the first wrong one say nothing."""
        own = self._of_request.setdefault(key, [0.0, 0.0])
        self._of_request.move_to_end(key)
        if len(self._of_request) > MAX_NUM_KNOWN:
            self._of_request.popitem(last=False)
        for counts in (own, self._of_all.setdefault(key[1], [0.0, 0.0])):
            counts[0] = counts[0] * DECAY + num_accepted
            counts[1] = counts[1] * DECAY + (num_accepted < num_drafts)

    def of(self, key: tuple[str, int]) -> float:
        """Between 0 and 1."""
        return _share(self._of_request.get(key), _share(self._of_all.get(key[1]), FIRST_ACCEPTANCE))


class StepTimes:
    """What steps that only decode took, by how many tokens they computed.

    unknown_s: what all steps are taken to last while none was measured.
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
        """Seconds of steps of these sizes: in proportion between known ones. What was never tried is taken to be
        cheap, so that it is: larger steps cost what the largest known one does, smaller ones their share of the
        smallest. Without any all are alike."""
        if self._sizes.size == 0:
            return np.full(num_tokens.size, self._unknown_s)
        return np.interp(num_tokens, self._sizes, self._medians)


@dataclass(slots=True)
class DraftingTime:
    """How many steps a draft model made, one for each draft of the request that has most; 0: it only caught up."""

    num_steps: int = 0


class DraftLengths:
    """Chooses drafts so that a step makes the most output a second, as far as is known; none where all cost more.

    The likeliest drafts come first: the next one of a request is right with the chance that such drafts of it had
    lately, the one behind it with that chance squared, and so on. While none pay, some are verified now and then, so
    that a change is noticed; and with many requests nothing is proposed for a while, as that takes time as well.
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
        """True when nobody needs to propose for a step of so many requests: drafts did not pay with as many."""
        if not self.is_at_rest(num_rows):
            return False
        self._rest_steps -= 1
        self._steps_without += 1
        return True

    def is_at_rest(self, num_rows: int) -> bool:
        """True when ``rests`` would say so now."""
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

        keys: [num_requests] their ids, and the evidence for what was proposed.
        counts: [num_requests] drafts that there are.
        num_tokens: what the step computes without drafts; ``num_rows`` requests get a token by it.
        is_by_model: [num_requests] True where a draft model is yet to be asked, which takes time for each draft.
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
        # A draft model makes a step for each place, over all requests at once.
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
        """Some drafts of one request, if none were verified for long."""
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
        """Measure what a draft model takes for so many requests; whoever asks it says how many steps it made."""
        measured, started_s = DraftingTime(), self._clock()
        yield measured
        if measured.num_steps:
            self._draft_times.note(num_rows, (self._clock() - started_s) / measured.num_steps)

    def note_verified(self, request_id: str, *, num_drafts: int, num_accepted: int) -> None:
        """The step with what was chosen last returned: so many of a request's drafts were right."""
        key = (request_id, self._evidence.get(request_id, 0))
        self._acceptance.note(key, num_drafts=num_drafts, num_accepted=num_accepted)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Take in what a step took that only decoded, and with no other one under way."""
        self._times.note(num_tokens, seconds)


def _share(counts: Sequence[float] | None, prior: float) -> float:
    right, wrong = counts or (0.0, 0.0)
    return (right + PRIOR_TRIALS * prior) / (right + wrong + PRIOR_TRIALS)


def _class_of(num_tokens: int) -> int:
    """Steps of about the same size count as one: all up to 16 tokens apart, larger ones by eighths of a power of 2."""
    grain = 1 << max(num_tokens.bit_length() - 4, 0)
    return num_tokens // grain * grain
