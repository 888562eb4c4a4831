"""``logit_bias``: numbers added to the logits of single tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from engine.contract.messages import SamplingParams
from engine.contract.step import IntArray
from engine.device.copies import upload
from engine.sampling.processors.processor import FOREVER, NEVER, Index, PerBatch, index_of
from engine.sampling.token_history import TokenHistory


class _BatchBias(NamedTuple):
    places: Index
    values: torch.Tensor


class LogitBias:
    """Adds each row's bias."""

    def __init__(self, max_num_seqs: int) -> None:
        self._is_concerned = np.zeros(max_num_seqs, dtype=np.bool_)
        self._bias: dict[int, tuple[tuple[int, float], ...]] = {}
        self._batch = PerBatch(self._gather)

    def set(self, row: int, sampling: SamplingParams, *, num_prompt_tokens: int) -> int:
        """See ``LogitsProcessor``."""
        bias = sampling.logit_bias
        if bias or self._is_concerned[row]:
            self._batch.forget()
            self._bias[row] = bias
        self._is_concerned[row] = bool(bias)
        return FOREVER if bias else NEVER

    def reads_history(self, row: int) -> bool:
        """See ``LogitsProcessor``."""
        return False

    def apply(self, logits: torch.Tensor, rows: IntArray, positions: IntArray, history: TokenHistory) -> None:
        """See ``LogitsProcessor``."""
        if self._is_concerned[rows].any():
            places, values = self._batch.of(rows, logits)
            logits.index_put_(places, values, accumulate=True)

    def _gather(self, rows: IntArray, vocab_size: int, device: torch.device) -> _BatchBias:
        found = [
            (index, token, value)
            for index, row in enumerate(rows.tolist())
            if self._is_concerned[row]
            for token, value in self._bias[row]
            if token < vocab_size
        ]
        values = np.array([value for _, _, value in found], dtype=np.float32)
        return _BatchBias(index_of([(index, token) for index, token, _ in found], device), upload(values, device))
