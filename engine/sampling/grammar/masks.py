"""The masks of a batch: each row's matcher is advanced to the end of its output, and tells which tokens may follow."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

from engine.contract.grammar import RowFailure
from engine.contract.messages import SamplingParams
from engine.contract.step import BoolArray, IntArray
from engine.device.cores import run_anywhere
from engine.sampling.grammar.compiler import REMEDY, GrammarStore, told_error
from engine.sampling.grammar.cost import FREE_S_PER_TOKEN, TOO_LONG, CostClocks, RowCost
from engine.sampling.token_history import TokenHistory

MAX_NUM_THREADS: Final = 8

_MISFIT: Final = "satisfy the grammar"
"""Part of the library's message if a token did not fit, as opposed to a limit that was exceeded."""

_ALL: Final = np.int32(-1)
_NO_TOKENS: Final[tuple[int, ...]] = ()


class Ending(NamedTuple):
    """An entry of a batch whose output must end now, with one of these tokens, whatever else forbids them."""

    entry: int
    token_ids: tuple[int, ...]


class BatchMasks(NamedTuple):
    """places: [num_entries] the index of each entry's mask, or -1. words: [num_masks, mask_words] bits of the tokens
    that may come next, token 0 in the lowest bit of the first word.
    """

    places: IntArray
    words: IntArray
    endings: Sequence[Ending]
    failures: Sequence[RowFailure]

    def of(self, entries: npt.NDArray[np.int64]) -> BatchMasks:
        """The masks of some entries of the batch, as a batch of their own."""
        endings = [
            Ending(int(found[0]), ending.token_ids)
            for ending in self.endings
            if (found := np.flatnonzero(entries == ending.entry)).size
        ]
        return BatchMasks(self.places[entries], self.words, endings, self.failures)


@dataclass(slots=True)
class _Row:
    """A row's matcher, advanced past the first ``num_consumed`` tokens of its output."""

    matcher: LLMatcher
    eos_token_ids: tuple[int, ...]
    ending_token_ids: tuple[int, ...]
    avoided_token_ids: tuple[int, ...]
    allowed_token_ids: npt.NDArray[np.int64] | None
    cost: RowCost = field(default_factory=RowCost)
    num_consumed: int = 0
    failure: str = ""


@dataclass(slots=True)
class _Job:
    """A batch whose masks are being filled. ``endings`` refer to indices of masks."""

    rows: IntArray
    positions: IntArray
    words: IntArray
    endings: list[Ending] = field(default_factory=list)
    failures: list[RowFailure] = field(default_factory=list)


class GrammarMasks:
    """Follows the outputs of rows. A row's state depends only on its tokens, not on who sampled them.

    A matcher follows draft tokens as far as they fit, and is then rolled back: only tokens before the first sampled
    position are certain. Another thread fills the masks from ``begin`` on, while the model computes.

    Masks that are filled in parallel are timed together. If that took long, the next batch fills and times them one by
    one.
    """

    def __init__(self, store: GrammarStore, clocks: CostClocks | None = None) -> None:
        self._store = store
        self._clocks = clocks or CostClocks()
        self._measures_each = False
        self._rows: dict[int, _Row] = {}
        self._parallel: LLExecutor | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: tuple[_Job, Future[None]] | None = None

    def set(self, row: int, sampling: SamplingParams) -> None:
        """Start to follow the output of a request that has a grammar."""
        assert sampling.grammar is not None
        allowed = sampling.allowed_token_ids
        self._rows[row] = _Row(
            self._store.new_matcher(sampling.grammar),
            eos_token_ids=self._store.eos_token_ids,
            ending_token_ids=tuple({*sampling.eos_token_ids, *sampling.stop_token_ids}),
            avoided_token_ids=sampling.eos_token_ids if sampling.ignore_eos else _NO_TOKENS,
            allowed_token_ids=None if allowed is None else np.array(allowed, np.int64),
        )

    def forget(self, row: int) -> None:
        """The new request in this row has no grammar."""
        self._rows.pop(row, None)

    def begin(self, rows: IntArray, positions: IntArray, history: TokenHistory) -> None:
        """Start to fill the masks of these batch entries. Their tokens must not change before ``take``."""
        self._settle()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="baton-masks", initializer=run_anywhere)
        job = self._new_job(rows, positions)
        self._pending = job, self._thread.submit(self._fill, job, history)

    def take(
        self, entries: npt.NDArray[np.int64], rows: IntArray, positions: IntArray, history: TokenHistory
    ) -> BatchMasks:
        """The masks of a batch; ``entries`` are its entries with a grammar."""
        job, masked, at = self._settle(), rows[entries], positions[entries]
        if job is None or not (np.array_equal(job.rows, masked) and np.array_equal(job.positions, at)):
            job = self._new_job(masked, at)
            self._fill(job, history)
        places: IntArray = np.full(len(rows), -1, np.int32)
        places[entries] = np.arange(len(entries), dtype=np.int32)
        endings = [Ending(int(entries[place]), token_ids) for place, token_ids in job.endings]
        return BatchMasks(places, job.words, endings, job.failures)

    def _settle(self) -> _Job | None:
        if self._pending is None:
            return None
        (job, done), self._pending = self._pending, None
        done.result()
        return job

    def _new_job(self, rows: IntArray, positions: IntArray) -> _Job:
        words: IntArray = np.full((len(rows), self._store.mask_words), _ALL, np.int32)
        return _Job(rows.copy(), positions.copy(), words)

    # ---- filling, in whichever thread

    def _fill(self, job: _Job, history: TokenHistory) -> None:
        """Fill all masks: in parallel for rows that occur once in the batch, one by one for the others."""
        rows, positions = job.rows.tolist(), job.positions.tolist()
        single: list[int] = []
        places: list[int] = []
        place = 0
        while place < len(rows):
            number, end = rows[place], place + 1
            while end < len(rows) and rows[end] == number:
                end += 1
            row = self._rows[number]
            first = int(history.num_prompt_tokens[number])
            begun_s = self._clocks.cpu_s()
            num_new = _advance(row, history.token_ids[number, first : positions[place]])
            if row.failure:
                job.failures.append(RowFailure(number, row.failure))
            elif end - place == 1:
                single.append(place)
                places.append(place)
                self._charge(job, number, begun_s, num_tokens=num_new)
            else:
                drafts = history.token_ids[number, positions[place] : positions[end - 1]].tolist()
                places += self._fill_drafts(row, job.words, place, drafts)
                self._charge(job, number, begun_s, num_tokens=num_new + end - place)
            place = end
        self._fill_single(job, single)
        endings = self._may_end(job.words[places]).tolist()
        for place, may_end in zip(places, endings, strict=True):
            row = self._rows[rows[place]]
            if may_end or row.allowed_token_ids is not None or row.matcher.is_error():
                is_known = not place or rows[place] != rows[place - 1]
                self._complete(job, place, row, may_end=may_end, is_known=is_known)

    def _fill_single(self, job: _Job, places: list[int]) -> None:
        """Fill the masks of rows that occur once; those of costly rows one by one, to charge each its own time."""
        row_of = {place: self._rows[int(job.rows[place])] for place in places}
        is_each_measured = self._measures_each or len(places) == 1
        joint = [] if is_each_measured else [place for place in places if not row_of[place].cost.is_suspect]
        self._measures_each = bool(joint) and self._fill_jointly([(row_of[at].matcher, at) for at in joint], job.words)
        for place in [place for place in places if place not in joint]:
            begun_s = self._clocks.cpu_s()
            _fill_one(row_of[place].matcher, job.words, place)
            self._charge(job, int(job.rows[place]), begun_s, num_tokens=1)

    def _fill_jointly(self, matchers: list[tuple[LLMatcher, int]], words: IntArray) -> bool:
        """Fill masks in parallel; True if it took so long that some row may be costly."""
        if self._parallel is None:
            self._parallel = LLExecutor(max(1, min((os.cpu_count() or 1) // 2, MAX_NUM_THREADS)))
        begun_s = self._clocks.wall_s()
        self._parallel.unsafe_compute_mask_ptr(matchers, words.ctypes.data, words.shape[1] * 4, len(words))
        return self._clocks.wall_s() - begun_s > FREE_S_PER_TOKEN

    def _charge(self, job: _Job, number: int, begun_s: float, *, num_tokens: int) -> None:
        """Charge a row for the CPU time since ``begun_s``. If its total is too high, its request fails."""
        row = self._rows[number]
        if not row.cost.charge(self._clocks.cpu_s() - begun_s, num_tokens=num_tokens) and not row.failure:
            row.failure = _cost(f"after {row.num_consumed} tokens {TOO_LONG}")
            job.failures.append(RowFailure(number, row.failure))

    @staticmethod
    def _fill_drafts(row: _Row, words: IntArray, place: int, drafts: list[int]) -> list[int]:
        """Fill a row's masks before and after each draft. Masks after a draft that does not fit allow everything."""
        filled, num_taken = [place], 0
        _fill_one(row.matcher, words, place)
        for number, token_id in enumerate(drafts, start=1):
            if row.matcher.is_error() or row.matcher.try_consume_tokens([token_id]) != 1:
                break
            num_taken += 1
            _fill_one(row.matcher, words, place + number)
            filled.append(place + number)
        if num_taken and not (row.matcher.is_error() or row.matcher.rollback(num_taken)):
            row.num_consumed = 0
            row.matcher.reset()
        return filled

    def _may_end(self, words: IntArray) -> BoolArray:
        """[num_masks] whether the outputs may end there. words: [num_masks, mask_words], straight from the matchers."""
        bits = _bits(words, self._store.eos_token_ids)
        may_end: BoolArray = np.asarray(bits.any(axis=1))
        return may_end

    @staticmethod
    def _complete(job: _Job, place: int, row: _Row, *, may_end: bool, is_known: bool) -> None:
        """Combine a row's mask with the request's other rules. ``is_known``: no draft precedes its position."""
        mask = job.words[place]
        if row.matcher.is_error():
            row.failure = _cost(told_error(row.matcher))
            if is_known:
                job.failures.append(RowFailure(int(job.rows[place]), row.failure))
            return
        if may_end:
            _set(mask, row.eos_token_ids, False)
            _set(mask, row.ending_token_ids, True)
            if row.avoided_token_ids:
                kept = mask.copy()
                _set(kept, row.avoided_token_ids, False)
                if kept.any():
                    mask[:] = kept
        if row.allowed_token_ids is None:
            return
        if _bits(mask, row.allowed_token_ids).any():
            return
        if may_end:
            mask[:] = 0
            _set(mask, row.ending_token_ids, True)
            job.endings.append(Ending(place, row.ending_token_ids))
        elif is_known:
            row.failure = "none of allowed_token_ids fits the grammar at this point of the output"
            job.failures.append(RowFailure(int(job.rows[place]), row.failure))


def _cost(told: str) -> str:
    return f"following the grammar failed ({told}): {REMEDY}"


def _advance(row: _Row, tokens: IntArray) -> int:
    """Advance a row's matcher to the end of its output; returns the number of new tokens."""
    if row.failure:
        return 0
    if tokens.size < row.num_consumed:
        row.matcher.reset()
        row.num_consumed = 0
    new = tokens[row.num_consumed :].tolist()
    row.num_consumed = tokens.size
    if new and not row.matcher.consume_tokens(new):
        told = told_error(row.matcher)
        row.failure = f"the output does not fit the grammar: {told}" if _MISFIT in told else _cost(told)
    return len(new)


def _fill_one(matcher: LLMatcher, words: IntArray, place: int) -> None:
    mask = words[place]
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


def _bits(words: IntArray, token_ids: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[..., num_tokens] 1 for each token that the masks [..., mask_words] allow; ids beyond the masks are left out."""
    ids = np.asarray(token_ids, np.int64)
    ids = ids[ids < words.shape[-1] * 32]
    found: npt.NDArray[np.int64] = (words[..., ids >> 5] >> (ids & 31)) & 1
    return found


def _set(mask: IntArray, token_ids: Sequence[int], allowed: bool) -> None:
    bits = mask.view(np.uint32)
    for token_id in token_ids:
        if token_id < mask.size * 32:
            bit = np.uint32(1 << (token_id & 31))
            bits[token_id >> 5] = bits[token_id >> 5] | bit if allowed else bits[token_id >> 5] & ~bit
