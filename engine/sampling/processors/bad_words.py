"""``bad_words``: sequences of tokens that must not occur in the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engine.contract.messages import SamplingParams
from engine.contract.step import IntArray
from engine.device.copies import put, upload
from engine.sampling.processors.processor import BAD_WORD, FOREVER, NEVER, PerBatch
from engine.sampling.token_history import TokenHistory

_ANY: Final = -1

Word = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _BatchWords:
    """One entry a word: the batch row it concerns, the tokens before its last one (right-aligned), and the last one."""

    index: npt.NDArray[np.int64]
    prefixes: IntArray
    num_prefix: IntArray
    last: npt.NDArray[np.int64]


class BadWords:
    """Masks the last token of a word whose other tokens stand at the end of the output."""

    def __init__(self, max_num_seqs: int) -> None:
        self._is_concerned = np.zeros(max_num_seqs, dtype=np.bool_)
        self._words: dict[int, tuple[Word, ...]] = {}
        self._batch = PerBatch(self._gather)

    def set(self, row: int, sampling: SamplingParams, *, num_prompt_tokens: int) -> int:
        """See ``LogitsProcessor``."""
        words = sampling.bad_words
        if words or self._is_concerned[row]:
            self._batch.forget()
            self._words[row] = words
        self._is_concerned[row] = bool(words)
        return FOREVER if words else NEVER

    def reads_history(self, row: int) -> bool:
        """See ``LogitsProcessor``."""
        return bool(self._is_concerned[row]) and any(len(word) > 1 for word in self._words[row])

    def apply(self, logits: torch.Tensor, rows: IntArray, positions: IntArray, history: TokenHistory) -> None:
        """See ``LogitsProcessor``."""
        if self._is_concerned[rows].any():
            index, columns = _banned(self._batch.of(rows, logits), rows, positions, history)
            put(logits, (upload(index, logits.device), upload(columns, logits.device)), BAD_WORD)

    def _gather(self, rows: IntArray, vocab_size: int, device: torch.device) -> _BatchWords:
        words = [
            (index, word)
            for index, row in enumerate(rows.tolist())
            if self._is_concerned[row]
            for word in self._words[row]
            if word and word[-1] < vocab_size
        ]
        width = max((len(word) - 1 for _, word in words), default=0)
        prefixes = np.full((len(words), width), _ANY, dtype=np.int32)
        for number, (_, word) in enumerate(words):
            prefixes[number, width - len(word) + 1 :] = word[:-1]
        return _BatchWords(
            index=np.array([index for index, _ in words], dtype=np.int64),
            prefixes=prefixes,
            num_prefix=np.array([len(word) - 1 for _, word in words], dtype=np.int32),
            last=np.array([word[-1] for _, word in words], dtype=np.int64),
        )


def _banned(
    words: _BatchWords, rows: IntArray, positions: IntArray, history: TokenHistory
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Batch rows and token ids of the words that the next token would complete: their beginnings end the output."""
    ends, chosen = positions[words.index], rows[words.index]
    width = words.prefixes.shape[1]
    columns = np.maximum(ends[:, None] - np.arange(width, 0, -1), 0)
    tokens = history.token_ids[chosen[:, None], columns]
    is_there = ((tokens == words.prefixes) | (words.prefixes == _ANY)).all(axis=1)
    is_there &= ends - history.num_prompt_tokens[chosen] >= words.num_prefix
    return words.index[is_there], words.last[is_there]
