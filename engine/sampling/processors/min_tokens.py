"""``min_tokens``: nothing ends the output before it has so many tokens."""

from __future__ import annotations

import numpy as np
import torch

from engine.contract.messages import SamplingParams
from engine.contract.step import IntArray
from engine.device.copies import put, upload
from engine.sampling.processors.processor import NEVER, TOO_EARLY
from engine.sampling.token_history import TokenHistory


class MinTokens:
    """Masks the tokens that would end a row's output before it has ``min_tokens`` tokens."""

    def __init__(self, max_num_seqs: int) -> None:
        self._min_length: IntArray = np.full(max_num_seqs, NEVER, dtype=np.int32)
        self._ending_token_ids: list[tuple[int, ...]] = [()] * max_num_seqs

    def set(self, row: int, sampling: SamplingParams, *, num_prompt_tokens: int) -> int:
        """See ``LogitsProcessor``."""
        eos_token_ids = () if sampling.ignore_eos else sampling.eos_token_ids
        ending_token_ids = tuple({*eos_token_ids, *sampling.stop_token_ids})
        self._ending_token_ids[row] = ending_token_ids
        min_length = num_prompt_tokens + sampling.min_tokens if sampling.min_tokens and ending_token_ids else NEVER
        self._min_length[row] = min_length
        return min_length

    def reads_history(self, row: int) -> bool:
        """See ``LogitsProcessor``."""
        return False

    def apply(self, logits: torch.Tensor, rows: IntArray, positions: IntArray, history: TokenHistory) -> None:
        """See ``LogitsProcessor``."""
        short = np.flatnonzero(positions < self._min_length[rows])
        endings = [self._ending_token_ids[row] for row in rows[short]]
        if not any(endings):
            return
        index = np.repeat(short, [len(ids) for ids in endings])
        columns = np.fromiter((token for ids in endings for token in ids), dtype=np.int64, count=len(index))
        inside = columns < logits.shape[1]
        put(logits, (upload(index[inside], logits.device), upload(columns[inside], logits.device)), TOO_EARLY)
