"""``allowed_token_ids``: every other token is impossible."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.contract.messages import SamplingParams
from engine.contract.step import IntArray
from engine.device.copies import upload
from engine.sampling.processors.processor import FOREVER, NEVER, PerBatch
from engine.sampling.token_history import TokenHistory

LongArray = npt.NDArray[np.int64]


class _BatchLimits(NamedTuple):
    """limited: [num_limited] batch rows; forbidden: [num_limited, vocab_size] True for tokens they may not draw."""

    limited: torch.Tensor
    forbidden: torch.Tensor


class AllowedTokens:
    """Sets the logits of all other tokens to minus infinity. Comes last, so that nothing can undo it.

    A batch is laid out as masks, not as indices: a request may allow nearly the whole vocabulary for many choices.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._is_concerned = np.zeros(max_num_seqs, dtype=np.bool_)
        self._allowed: dict[int, LongArray] = {}
        self._batch = PerBatch(self._gather)

    def set(self, row: int, sampling: SamplingParams, *, num_prompt_tokens: int) -> int:
        """See ``LogitsProcessor``."""
        allowed = sampling.allowed_token_ids
        if allowed is not None or self._is_concerned[row]:
            self._batch.forget()
            self._allowed[row] = np.array(allowed or (), np.int64)
        self._is_concerned[row] = allowed is not None
        return NEVER if allowed is None else FOREVER

    def reads_history(self, row: int) -> bool:
        """See ``LogitsProcessor``."""
        return False

    def apply(self, logits: torch.Tensor, rows: IntArray, positions: IntArray, history: TokenHistory) -> None:
        """See ``LogitsProcessor``."""
        if self._is_concerned[rows].any():
            limited, forbidden = self._batch.of(rows, logits)
            if len(limited) == len(logits):
                logits.masked_fill_(forbidden, -torch.inf)
            else:
                logits[limited] = logits.index_select(0, limited).masked_fill_(forbidden, -torch.inf)

    def _gather(self, rows: IntArray, vocab_size: int, device: torch.device) -> _BatchLimits:
        limited = np.flatnonzero(self._is_concerned[rows])
        forbidden = np.ones((len(limited), vocab_size), np.bool_)
        for number, row in enumerate(rows[limited].tolist()):
            allowed = self._allowed[row]
            forbidden[number, allowed[allowed < vocab_size]] = False
        return _BatchLimits(upload(limited, device), upload(forbidden, device))
