"""``no_repeat_ngram_size``: no sequence of so many tokens occurs twice."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.contract.messages import SamplingParams
from engine.contract.step import IntArray
from engine.device.copies import put, upload
from engine.sampling.processors.processor import BAD_WORD, FOREVER, NEVER
from engine.sampling.token_history import TokenHistory


class RepeatedNgrams:
    """Masks each token that would end a sequence of ``no_repeat_ngram_size`` tokens which prompt and output have
    already.

    As in transformers' ``NoRepeatNGramLogitsProcessor``. Where nothing else can be drawn, such tokens are, like bad
    words.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._size: IntArray = np.zeros(max_num_seqs, dtype=np.int32)

    def set(self, row: int, sampling: SamplingParams, *, num_prompt_tokens: int) -> int:
        """See ``LogitsProcessor``."""
        self._size[row] = sampling.no_repeat_ngram_size
        return FOREVER if sampling.no_repeat_ngram_size else NEVER

    def reads_history(self, row: int) -> bool:
        """See ``LogitsProcessor``."""
        return bool(self._size[row])

    def apply(self, logits: torch.Tensor, rows: IntArray, positions: IntArray, history: TokenHistory) -> None:
        """See ``LogitsProcessor``."""
        concerned = np.flatnonzero(self._size[rows])
        if concerned.size == 0:
            return
        columns = [
            _repeating(history.token_ids[rows[index], : positions[index]], int(self._size[rows[index]]))
            for index in concerned
        ]
        index = np.repeat(concerned, [len(found) for found in columns])
        put(logits, (upload(index, logits.device), upload(np.concatenate(columns), logits.device)), BAD_WORD)


def _repeating(tokens: npt.NDArray[np.int32], size: int) -> npt.NDArray[np.int64]:
    """The tokens behind each earlier place where the last ``size - 1`` tokens stand.

    Compared backwards, token by token: after the first comparison hardly any places are left.
    """
    num_tokens = len(tokens)
    ends = np.arange(size - 1, num_tokens)
    for distance in range(1, size):
        if ends.size == 0:
            break
        ends = ends[tokens[ends - distance] == tokens[num_tokens - distance]]
    return tokens[ends].astype(np.int64)
