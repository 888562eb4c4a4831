"""``allowed_token_ids``: every other token is impossible."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from engine.contract.messages import SamplingParams
from engine.contract.step import IntArray
from engine.device.copies import put, upload
from engine.sampling.processors.processor import FOREVER, NEVER, Index, PerBatch, index_of
from engine.sampling.token_history import TokenHistory


class _BatchLimits(NamedTuple):
    limited: torch.Tensor
    allowed: Index


class AllowedTokens:
    """Sets the logits of all other tokens to minus infinity. Comes last, so that nothing can undo it."""

    def __init__(self, max_num_seqs: int) -> None:
        self._is_concerned = np.zeros(max_num_seqs, dtype=np.bool_)
        self._allowed: dict[int, tuple[int, ...]] = {}
        self._batch = PerBatch(self._gather)

    def set(self, row: int, sampling: SamplingParams, *, num_prompt_tokens: int) -> int:
        """See ``LogitsProcessor``."""
        allowed = sampling.allowed_token_ids
        if allowed is not None or self._is_concerned[row]:
            self._batch.forget()
            self._allowed[row] = allowed or ()
        self._is_concerned[row] = allowed is not None
        return NEVER if allowed is None else FOREVER

    def reads_history(self, row: int) -> bool:
        """See ``LogitsProcessor``."""
        return False

    def apply(self, logits: torch.Tensor, rows: IntArray, positions: IntArray, history: TokenHistory) -> None:
        """See ``LogitsProcessor``."""
        if self._is_concerned[rows].any():
            limited, allowed = self._batch.of(rows, logits)
            kept = logits[allowed]
            put(logits, (limited,), -torch.inf)
            logits[allowed] = kept

    def _gather(self, rows: IntArray, vocab_size: int, device: torch.device) -> _BatchLimits:
        limited = [(index, row) for index, row in enumerate(rows.tolist()) if self._is_concerned[row]]
        allowed = [(index, token) for index, row in limited for token in self._allowed[row] if token < vocab_size]
        indices = np.array([index for index, _ in limited], dtype=np.int64)
        return _BatchLimits(upload(indices, device), index_of(allowed, device))
