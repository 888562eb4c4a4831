"""Draws the next token of every row of a batch. The draw for a (seed, position) is always the same, on any worker.

Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011 (Philox4x32-10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.contract.grammar import RowFailure
from engine.contract.step import BoolArray, IntArray
from engine.device.copies import upload
from engine.sampling.filters import num_deciding_candidates, thresholds
from engine.sampling.grammar.masks import BatchMasks
from engine.sampling.grammar.rows import forbid
from engine.sampling.logprobs import LogprobTensors, compute_logprobs
from engine.sampling.most_likely import MostLikely
from engine.sampling.processors.processor import LOWEST
from engine.sampling.sampling_rows import SamplingRows
from engine.sampling.token_history import TokenHistory

NUM_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)


class CandidateTensors(NamedTuple):
    """The columns of ``BeamCandidates`` as tensors on the device."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """One token for each row of logits, on the device of the logits.

    ``logprobs`` are for ``logprob_rows``, the rows that ask for them; ``candidates`` are for ``candidate_rows``, the
    rows that are beams. The token of a row in ``failures`` is invalid.
    token_ids: [num_rows] int32; has_nan: [num_rows] bool, True if the row's logits held a NaN.
    """

    token_ids: torch.Tensor
    has_nan: torch.Tensor
    logprob_rows: IntArray
    candidate_rows: IntArray
    logprobs: LogprobTensors | None = None
    candidates: CandidateTensors | None = None
    failures: Sequence[RowFailure] = ()


class Sampler:
    """Samples a whole batch at once; a batch of plain greedy rows costs one pass over the logits.

    A row's draw depends only on its logits, parameters, tokens and (seed, position), never on other rows. If
    ``may_wait`` is False, nothing waits for the device: decisions that depend on values of the logits are avoided, by
    doing the work for all rows.
    """

    def __init__(
        self, sampling: SamplingRows, history: TokenHistory, *, may_wait: bool, most_likely: MostLikely | None = None
    ) -> None:
        self._sampling = sampling
        self._history = history
        self._may_wait = may_wait
        self._most_likely = most_likely or MostLikely()

    def reads_history(self, rows: IntArray) -> bool:
        """True if the draw of any of these rows depends on the tokens that it holds."""
        return bool(self._sampling.reads_history[rows].any())

    def begin(self, rows: IntArray, positions: IntArray) -> None:
        """Start the work that needs no logits; all tokens before these positions must be known. See ``sample``."""
        self._sampling.grammar.begin(rows, positions, self._history)

    def sample(self, logits: torch.Tensor, rows: IntArray, positions: IntArray) -> SampledTokens:
        """Choose a token for each row of logits.

        logits: [num_rows, vocab_size], model dtype; rows: [num_rows] the batch row of each; positions: [num_rows]
            position of each new token. A row may appear several times with different positions; each new token follows
            the row's tokens before its position.
        """
        masks = self._sampling.grammar.take(rows, positions, self._history)
        token_ids, has_nan, is_open = self._find(logits, rows, positions, masks)
        if is_open.all():
            token_ids = self._choose(logits.to(torch.float32, copy=True), rows, positions, masks)
        elif is_open.any():
            index = np.flatnonzero(is_open)
            places = upload(index, logits.device)
            part = None if masks is None else masks.of(index)
            open_logits = logits.index_select(0, places).to(torch.float32)
            token_ids[places] = self._choose(open_logits, rows[index], positions[index], part).to(token_ids.dtype)
        elif not self._may_wait:
            highest = _without_nan(logits.to(torch.float32, copy=True)).argmax(dim=1)
            token_ids = torch.where(has_nan, highest.to(torch.int32), token_ids)
        asking = np.flatnonzero(self._sampling.num_logprobs[rows] >= 0)
        beams = np.flatnonzero(self._sampling.num_candidates[rows])
        return SampledTokens(
            token_ids=token_ids.to(torch.int32),
            has_nan=has_nan,
            logprob_rows=rows[asking],
            failures=() if masks is None else masks.failures,
            logprobs=self._logprobs(logits, rows, token_ids, asking) if asking.size else None,
            candidate_rows=rows[beams],
            candidates=self._candidates(logits, rows, positions, beams) if beams.size else None,
        )

    def _find(
        self, logits: torch.Tensor, rows: IntArray, positions: IntArray, masks: BatchMasks | None
    ) -> tuple[torch.Tensor, torch.Tensor, BoolArray]:
        """The most likely token of each row, which rows hold a NaN, and [num_rows] bool: which rows still need a
        choice.

        A greedy row with a mask is decided here without a copy or change of its logits. If nothing may wait for the
        device, one open row makes the whole batch open: telling rows apart would need their logits.
        """
        sampling = self._sampling
        is_open: BoolArray = ~sampling.is_greedy[rows] | (positions < sampling.changed_until[rows])
        if masks is not None:
            is_open[[ending.entry for ending in masks.endings]] = True
        if not self._may_wait:
            is_open[:] = is_open.any() or masks is not None
        if masks is None or is_open.all():
            token_ids, has_nan = self._most_likely(logits)
            if self._may_wait:
                is_open |= has_nan.cpu().numpy()
            return token_ids, has_nan, is_open
        found = self._most_likely.allowed(logits, masks.places, masks.words)
        return found.token_ids, found.has_nan, is_open | found.is_open.numpy()

    def _choose(
        self, logits: torch.Tensor, rows: IntArray, positions: IntArray, masks: BatchMasks | None
    ) -> torch.Tensor:
        """Choose a token for each row with all its parameters. Changes the logits, which must be float32."""
        sampling = self._sampling
        logits = _without_nan(logits)
        for processor in sampling.processors:
            processor.apply(logits, rows, positions, self._history)
        if masks is not None:
            forbid(logits, masks)
        token_ids = logits.argmax(dim=1)
        random = np.flatnonzero(sampling.temperature[rows] > 0.0)
        if random.size:
            index = upload(random, logits.device)
            token_ids[index] = self._draw(logits.index_select(0, index), rows[random], positions[random])
        return token_ids

    def _logprobs(
        self, logits: torch.Tensor, rows: IntArray, token_ids: torch.Tensor, asking: npt.NDArray[np.intp]
    ) -> LogprobTensors:
        """The model's raw log-probabilities of the chosen tokens, for the rows at the indices ``asking``."""
        index = upload(asking, logits.device)
        num_top = int(self._sampling.num_logprobs[rows].max())
        return compute_logprobs(logits.index_select(0, index), token_ids.index_select(0, index), num_top)

    def _candidates(
        self, logits: torch.Tensor, rows: IntArray, positions: IntArray, beams: npt.NDArray[np.intp]
    ) -> CandidateTensors:
        """The most likely next tokens of the rows at the indices ``beams``.

        As in transformers, processors change the log-probabilities, which are not renormalised afterwards.
        """
        chosen = logits.index_select(0, upload(beams, logits.device)).to(torch.float32)
        values = _without_nan(chosen).log_softmax(dim=1)
        for processor in self._sampling.processors:
            processor.apply(values, rows[beams], positions[beams], self._history)
        num_candidates = int(self._sampling.num_candidates[rows].max())
        top = values.topk(min(num_candidates, values.shape[1]), dim=1)
        return CandidateTensors(token_ids=top.indices.to(torch.int32), logprobs=top.values)

    def _draw(self, logits: torch.Tensor, rows: IntArray, positions: IntArray) -> torch.Tensor:
        """Invert the cumulative distribution, in the order of token ids, at one uniform number a row."""
        sampling, device = self._sampling, logits.device
        temperature = upload(sampling.temperature[rows], device)[:, None]
        logits = logits.clamp_(min=torch.finfo(torch.float32).min)
        scaled = (logits - logits.amax(dim=1, keepdim=True)) / temperature
        lowest = self._thresholds(scaled, rows)
        weights = scaled.double().exp().masked_fill_(scaled < lowest[:, None], 0.0)
        cumulative = weights.cumsum(dim=1)
        totals = cumulative[:, -1:]
        draws = upload(uniforms(sampling.seed[rows], positions), device)[:, None]
        # if rounding reached the total, the index would point past the last token that may be drawn
        targets = torch.minimum(draws * totals, torch.nextafter(totals, torch.zeros_like(totals)))
        return torch.searchsorted(cumulative, targets, right=True).squeeze(1)

    def _thresholds(self, scaled: torch.Tensor, rows: IntArray) -> torch.Tensor:
        sampling, device = self._sampling, scaled.device
        top_k, top_p = sampling.top_k[rows], sampling.top_p[rows]
        filters = (upload(top_k, device), upload(top_p, device), upload(sampling.min_p[rows], device))
        if self._may_wait:
            return thresholds(scaled, *filters)
        sorting = np.flatnonzero((top_k > 0) | (top_p < 1.0))
        num_candidates = num_deciding_candidates(top_k[sorting], scaled.shape[1])
        return thresholds(scaled, *filters, sorting=upload(sorting, device), num_candidates=num_candidates)


def _without_nan(logits: torch.Tensor) -> torch.Tensor:
    """The float32 logits with NaN and infinities replaced."""
    return logits.nan_to_num_(LOWEST, torch.finfo(torch.float32).max, LOWEST)


UInt64Array = npt.NDArray[np.uint64]


def philox4x32(counters: UInt64Array, keys: UInt64Array) -> UInt64Array:
    """Encrypt counters [4, n] under keys [2, n], both of 32-bit words stored in uint64; returns [4, n] such words."""
    a, b, c, d = counters
    key_a, key_b = keys
    for _ in range(NUM_ROUNDS):
        product_a = a * _MULTIPLIERS[0]
        product_b = c * _MULTIPLIERS[1]
        a, c = (product_b >> _WORD_BITS) ^ b ^ key_a, (product_a >> _WORD_BITS) ^ d ^ key_b
        b, d = product_b & _LOW_WORD, product_a & _LOW_WORD
        key_a, key_b = (key_a + _KEY_STEPS[0]) & _LOW_WORD, (key_b + _KEY_STEPS[1]) & _LOW_WORD
    return np.stack((a, b, c, d))


def uniforms(seeds: UInt64Array, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each pair of seed and position, with 53 random bits."""
    counters = np.zeros((4, len(seeds)), dtype=np.uint64)
    counters[0] = positions
    keys = np.stack((seeds & _LOW_WORD, seeds >> _WORD_BITS))
    high, low, _, _ = philox4x32(counters, keys)
    bits = (high << np.uint64(21)) | (low >> np.uint64(11))
    result: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return result
