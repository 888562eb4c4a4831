"""``repetition_penalty``, ``presence_penalty``, ``frequency_penalty``: what a row holds becomes less likely."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.contract.messages import SamplingParams
from engine.contract.step import IntArray
from engine.device.copies import upload
from engine.sampling.processors.processor import FOREVER, LOWEST, NEVER
from engine.sampling.token_history import TokenHistory

FloatArray = npt.NDArray[np.float32]
LongArray = npt.NDArray[np.int64]


class Penalties:
    """Repetition divides the positive and multiplies the negative logits of all tokens in prompt and output. For tokens
    in the output, presence is subtracted once, and frequency once for each occurrence.

    The cost depends on the tokens that a row holds, not on the vocabulary.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._is_concerned = np.zeros(max_num_seqs, dtype=np.bool_)
        self._presence: FloatArray = np.zeros(max_num_seqs, dtype=np.float32)
        self._frequency: FloatArray = np.zeros(max_num_seqs, dtype=np.float32)
        self._repetition: FloatArray = np.ones(max_num_seqs, dtype=np.float32)

    def set(self, row: int, sampling: SamplingParams, *, num_prompt_tokens: int) -> int:
        """See ``LogitsProcessor``."""
        self._presence[row] = sampling.presence_penalty
        self._frequency[row] = sampling.frequency_penalty
        self._repetition[row] = sampling.repetition_penalty
        self._is_concerned[row] = sampling.has_penalties
        return FOREVER if sampling.has_penalties else NEVER

    def reads_history(self, row: int) -> bool:
        """See ``LogitsProcessor``."""
        return bool(self._is_concerned[row])

    def apply(self, logits: torch.Tensor, rows: IntArray, positions: IntArray, history: TokenHistory) -> None:
        """See ``LogitsProcessor``."""
        penalised = np.flatnonzero(self._is_concerned[rows])
        if penalised.size == 0:
            return
        chosen, lengths = rows[penalised], positions[penalised].astype(np.int64)
        owners = np.repeat(np.arange(chosen.size), lengths)
        token_ids = _tokens_of(history, chosen, lengths)
        held = (upload(penalised[owners], logits.device), upload(token_ids, logits.device))

        def of_owner(values: FloatArray) -> torch.Tensor:
            return upload(values[chosen][owners], logits.device)

        # A token that occurs several times is computed each time, always with the same result.
        part, repetition = logits[held], of_owner(self._repetition)
        part = torch.where(part > 0, part / repetition, part * repetition)
        frequency, presence = self._frequency, self._presence
        if frequency[chosen].any() or presence[chosen].any():
            places = np.arange(owners.size) - (np.cumsum(lengths) - lengths)[owners]
            is_output = (places >= history.num_prompt_tokens[chosen][owners]).astype(np.float32)
            used = _sum_of_equals(
                is_output, owners * logits.shape[1] + token_ids, chosen.size * logits.shape[1], logits
            )
            part -= of_owner(frequency) * used
            part -= of_owner(presence) * (used > 0)
        # a penalty near 0 can overflow float32, and a penalty of 0 turns a masked logit into NaN
        logits[held] = part.nan_to_num_(LOWEST, torch.finfo(torch.float32).max, LOWEST)


def _tokens_of(history: TokenHistory, rows: IntArray, lengths: LongArray) -> LongArray:
    """The first ``lengths[i]`` tokens of each row, rows back to back."""
    pairs = zip(rows.tolist(), lengths.tolist(), strict=True)
    return np.concatenate([history.token_ids[row, :length] for row, length in pairs]).astype(np.int64)


def _sum_of_equals(values: FloatArray, keys: LongArray, num_keys: int, like: torch.Tensor) -> torch.Tensor:
    """For each value, the sum of all values with the same key, on the device of ``like``."""
    index = upload(keys, like.device)
    sums = torch.zeros(num_keys, device=like.device).scatter_add_(0, index, upload(values, like.device))
    return sums.index_select(0, index)
