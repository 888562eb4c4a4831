"""Draws the next token of every row of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.messages import LogprobTable
from engine.sample.filters import thresholds
from engine.sample.logit_rules import LOWEST
from engine.sample.logprobs import compute_logprobs
from engine.sample.penalties import apply_penalties, mask_ending_tokens
from engine.sample.philox import uniforms
from engine.sample.sampling_rows import SamplingRows
from engine.sample.token_history import TokenHistory
from engine.step import BoolArray, IntArray, SampledLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """One token a row; has_nan tells whose logits held a NaN; logprobs are of the rows that ask for them."""

    token_ids: IntArray
    has_nan: BoolArray
    logprobs: SampledLogprobs | None = None


class Sampler:
    """Vectorised over the batch; a batch of plain greedy rows costs one pass over the logits.

    What is drawn for a row depends on its logits, parameters, tokens and (seed, position) alone, never on the rows
    beside it (I1).
    """

    def __init__(self, sampling: SamplingRows, history: TokenHistory) -> None:
        self._sampling = sampling
        self._history = history

    def sample(self, logits: torch.Tensor, rows: IntArray, positions: IntArray) -> SampledTokens:
        """Choose a token for each row.

        logits: [num_rows, vocab_size], model dtype; positions: [num_rows] where each new token will stand.
        """
        maxima, most_likely = logits.max(dim=1)
        has_nan: BoolArray = maxima.isnan().cpu().numpy()
        is_short = positions < self._sampling.min_length[rows]
        if has_nan.any() or is_short.any() or not self._sampling.is_plain[rows].all():
            token_ids = self._choose(logits, rows, positions)
        else:
            token_ids = most_likely
        return SampledTokens(
            token_ids=token_ids.to(torch.int32).cpu().numpy(),
            has_nan=has_nan,
            logprobs=self._logprobs(logits, rows, token_ids),
        )

    def _choose(self, logits: torch.Tensor, rows: IntArray, positions: IntArray) -> torch.Tensor:
        """A token for each row when not all of them just take the most likely one."""
        sampling = self._sampling
        logits = logits.to(torch.float32, copy=True).nan_to_num_(LOWEST, torch.finfo(torch.float32).max, LOWEST)
        sampling.rules.add_bias(logits, rows)
        apply_penalties(logits, rows, positions, sampling, self._history)
        sampling.rules.mask_words(logits, rows, positions, self._history)
        mask_ending_tokens(logits, rows, positions, sampling)
        sampling.rules.limit(logits, rows)
        token_ids = logits.argmax(dim=1)
        random = np.flatnonzero(sampling.temperature[rows] > 0.0)
        if random.size:
            index = torch.from_numpy(random).to(logits.device)
            token_ids[index] = self._draw(logits.index_select(0, index), rows[random], positions[random])
        return token_ids

    def _logprobs(self, logits: torch.Tensor, rows: IntArray, token_ids: torch.Tensor) -> SampledLogprobs | None:
        """What the model itself says of the chosen tokens, for the rows that ask."""
        wanted = self._sampling.num_logprobs[rows]
        asking = np.flatnonzero(wanted >= 0)
        if asking.size == 0:
            return None
        index = torch.from_numpy(asking).to(logits.device)
        table: LogprobTable = compute_logprobs(
            logits.index_select(0, index), token_ids.index_select(0, index), int(wanted.max())
        )
        return SampledLogprobs(rows=rows[asking], table=table)

    def _draw(self, logits: torch.Tensor, rows: IntArray, positions: IntArray) -> torch.Tensor:
        """Inverse of the cumulative distribution, in the order of token ids, at one uniform number a row."""
        sampling, device = self._sampling, logits.device
        temperature = torch.from_numpy(sampling.temperature[rows]).to(device)[:, None]
        logits = logits.clamp_(min=torch.finfo(torch.float32).min)
        scaled = (logits - logits.amax(dim=1, keepdim=True)) / temperature
        lowest = thresholds(
            scaled,
            torch.from_numpy(sampling.top_k[rows]).to(device),
            torch.from_numpy(sampling.top_p[rows]).to(device),
            torch.from_numpy(sampling.min_p[rows]).to(device),
        )
        weights = scaled.double().exp().masked_fill_(scaled < lowest[:, None], 0.0)
        cumulative = weights.cumsum(dim=1)
        totals = cumulative[:, -1:]
        draws = torch.from_numpy(uniforms(sampling.seed[rows], positions)).to(device)[:, None]
        # rounding up to the total would point past the last token that may be drawn
        targets = torch.minimum(draws * totals, torch.nextafter(totals, torch.zeros_like(totals)))
        return torch.searchsorted(cumulative, targets, right=True).squeeze(1)
