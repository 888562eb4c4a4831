"""``bad_words``: sequences of tokens that must not occur in the output."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from engine.contract.messages import SamplingParams
from engine.contract.step import IntArray
from engine.device.copies import put, upload
from engine.sampling.processors.processor import BAD_WORD, FOREVER, NEVER, PerBatch
from engine.sampling.token_history import TokenHistory

LongArray = npt.NDArray[np.int64]
Word = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Words:
    """Bad words, with their prefixes (all tokens but the last) in one flat array, so that short words do not pay for
    long ones.

    The prefix of word ``i`` is the ``num_prefix[i]`` tokens of ``prefixes`` that end at ``prefix_ends[i]``; its last
    token is ``last[i]``.
    """

    prefixes: IntArray
    prefix_ends: LongArray
    num_prefix: IntArray
    last: LongArray

    @classmethod
    def of(cls, words: tuple[Word, ...]) -> _Words:
        """The words of one request."""
        given = [word for word in words if word]
        num_prefix = np.array([len(word) - 1 for word in given], dtype=np.int32)
        return cls(
            prefixes=np.fromiter(chain.from_iterable(word[:-1] for word in given), dtype=np.int32),
            prefix_ends=np.cumsum(num_prefix, dtype=np.int64),
            num_prefix=num_prefix,
            last=np.array([word[-1] for word in given], dtype=np.int64),
        )


@dataclass(frozen=True, slots=True)
class _BatchWords:
    """The words of a batch, with the batch row of each."""

    index: LongArray
    words: _Words


class BadWords:
    """Masks the last token of each bad word whose prefix the output ends with."""

    def __init__(self, max_num_seqs: int) -> None:
        self._is_concerned = np.zeros(max_num_seqs, dtype=np.bool_)
        self._words: dict[int, _Words] = {}
        self._batch = PerBatch(self._gather)

    def set(self, row: int, sampling: SamplingParams, *, num_prompt_tokens: int) -> int:
        """See ``LogitsProcessor``."""
        words = sampling.bad_words
        if words or self._is_concerned[row]:
            self._batch.forget()
            self._words[row] = _Words.of(words)
        self._is_concerned[row] = bool(words)
        return FOREVER if words else NEVER

    def reads_history(self, row: int) -> bool:
        """See ``LogitsProcessor``."""
        return bool(self._is_concerned[row]) and self._words[row].prefixes.size > 0

    def apply(self, logits: torch.Tensor, rows: IntArray, positions: IntArray, history: TokenHistory) -> None:
        """See ``LogitsProcessor``."""
        if self._is_concerned[rows].any():
            index, columns = _banned(self._batch.of(rows, logits), rows, positions, history)
            put(logits, (upload(index, logits.device), upload(columns, logits.device)), BAD_WORD)

    def _gather(self, rows: IntArray, vocab_size: int, device: torch.device) -> _BatchWords:
        """The words of a batch in which at least one row has some."""
        concerned = [index for index, row in enumerate(rows.tolist()) if self._is_concerned[row]]
        of_rows = [self._words[int(rows[index])] for index in concerned]
        num_words = [len(words.last) for words in of_rows]
        num_prefixes = np.array([len(words.prefixes) for words in of_rows], dtype=np.int64)
        last = np.concatenate([words.last for words in of_rows])
        prefix_ends = np.concatenate([words.prefix_ends for words in of_rows])
        prefix_ends += np.repeat(np.cumsum(num_prefixes) - num_prefixes, num_words)
        can_end = last < vocab_size
        return _BatchWords(
            index=np.repeat(np.array(concerned, dtype=np.int64), num_words)[can_end],
            words=_Words(
                prefixes=np.concatenate([words.prefixes for words in of_rows]),
                prefix_ends=prefix_ends[can_end],
                num_prefix=np.concatenate([words.num_prefix for words in of_rows])[can_end],
                last=last[can_end],
            ),
        )


def _banned(
    batch: _BatchWords, rows: IntArray, positions: IntArray, history: TokenHistory
) -> tuple[LongArray, LongArray]:
    """Batch rows and token ids that would complete a bad word, because the output ends with its prefix.

    Prefixes are compared backwards, token by token, up to the first difference: a step costs little more than one
    comparison a word.
    """
    words = batch.words
    ends, chosen = positions[batch.index], rows[batch.index]
    open_words = np.flatnonzero(ends - history.num_prompt_tokens[chosen] >= words.num_prefix)
    found: list[LongArray] = []
    distance = 0
    while open_words.size:
        is_whole = words.num_prefix[open_words] == distance
        found.append(open_words[is_whole])
        open_words = open_words[~is_whole]
        distance += 1
        said = history.token_ids[chosen[open_words], ends[open_words] - distance]
        open_words = open_words[said == words.prefixes[words.prefix_ends[open_words] - distance]]
    numbers = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
    return batch.index[numbers], words.last[numbers]
