"""Rules of requests about single tokens: bias, allowed tokens, bad words; applied to a whole batch at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engine.messages import LogitRules
from engine.runner.upload import upload
from engine.sample.token_history import TokenHistory
from engine.step import BoolArray, IntArray

LOWEST: Final = -1e28
"""Stands for logits of minus infinity and for NaN: below everything that a model computes."""

BAD_WORD: Final = -1e29
"""The end of a bad word: drawn only if nothing else may be."""

TOO_EARLY: Final = -1e30
"""A token that would end the output before ``min_tokens``: drawn only if nothing but it and bad words may be."""

_ANY: Final = -1

Index = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _BadWords:
    """One entry a word: the batch row it concerns, the tokens before its last one (right-aligned), and the last one."""

    index: npt.NDArray[np.int64]
    prefixes: IntArray
    num_prefix: IntArray
    last: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The rules of one batch: where to add ``bias``, which rows are limited to what is ``allowed_at``, bad words."""

    bias_at: Index
    bias: torch.Tensor
    limited: torch.Tensor
    allowed_at: Index
    words: _BadWords


class LogitRuleRows:
    """The rules of every row. A batch in which no row has any costs one look at an array.

    What a batch needs is put together when its rows change: a decode step on the same rows is a few indexed writes.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.has_rules: BoolArray = np.zeros(max_num_seqs, dtype=np.bool_)
        self._rules: dict[int, LogitRules] = {}
        self._planned: tuple[bytes, _Plan] | None = None

    def set(self, row: int, rules: LogitRules | None) -> None:
        """Store what a new request in a row wants."""
        if rules is None and not self.has_rules[row]:
            return
        self._planned = None
        self.has_rules[row] = rules is not None
        self._rules.pop(row, None)
        if rules is not None:
            self._rules[row] = rules

    def add_bias(self, logits: torch.Tensor, rows: IntArray) -> None:
        """Add each row's bias to its logits [num_rows, vocab_size] float32, in place."""
        if self.has_rules[rows].any():
            plan = self._plan(logits, rows)
            logits.index_put_(plan.bias_at, plan.bias, accumulate=True)

    def mask_words(self, logits: torch.Tensor, rows: IntArray, positions: IntArray, history: TokenHistory) -> None:
        """Mask, in place, the last tokens of bad words whose other tokens stand at the end of the output."""
        if not self.has_rules[rows].any():
            return
        index, columns = _banned(self._plan(logits, rows).words, rows, positions, history)
        logits[upload(index, logits.device), upload(columns, logits.device)] = BAD_WORD

    def limit(self, logits: torch.Tensor, rows: IntArray) -> None:
        """Make impossible, in place, every token that a row does not allow."""
        if not self.has_rules[rows].any():
            return
        plan = self._plan(logits, rows)
        if plan.limited.numel():
            kept = logits[plan.allowed_at]
            logits[plan.limited] = -torch.inf
            logits[plan.allowed_at] = kept

    def _plan(self, logits: torch.Tensor, rows: IntArray) -> _Plan:
        key = rows.tobytes()
        if self._planned is None or self._planned[0] != key:
            self._planned = (key, self._make_plan(rows, logits.shape[1], logits.device))
        return self._planned[1]

    def _make_plan(self, rows: IntArray, vocab_size: int, device: torch.device) -> _Plan:
        ruled = [(index, self._rules[row]) for index, row in enumerate(rows.tolist()) if self.has_rules[row]]
        bias = [(index, token, value) for index, rules in ruled for token, value in rules.bias if token < vocab_size]
        limited = [(index, rules.allowed_token_ids) for index, rules in ruled if rules.allowed_token_ids is not None]
        allowed = [(index, token) for index, tokens in limited for token in tokens if token < vocab_size]

        def at(pairs: list[tuple[int, int]]) -> Index:
            table = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
            return upload(table[0].copy(), device), upload(table[1].copy(), device)

        return _Plan(
            bias_at=at([(index, token) for index, token, _ in bias]),
            bias=upload(np.array([value for _, _, value in bias], dtype=np.float32), device),
            limited=upload(np.array([index for index, _ in limited], dtype=np.int64), device),
            allowed_at=at(allowed),
            words=_join_words(ruled, vocab_size),
        )


def _join_words(ruled: list[tuple[int, LogitRules]], vocab_size: int) -> _BadWords:
    words = [(index, word) for index, rules in ruled for word in rules.bad_words if word and word[-1] < vocab_size]
    width = max((len(word) - 1 for _, word in words), default=0)
    prefixes = np.full((len(words), width), _ANY, dtype=np.int32)
    for number, (_, word) in enumerate(words):
        prefixes[number, width - len(word) + 1 :] = word[:-1]
    return _BadWords(
        index=np.array([index for index, _ in words], dtype=np.int64),
        prefixes=prefixes,
        num_prefix=np.array([len(word) - 1 for _, word in words], dtype=np.int32),
        last=np.array([word[-1] for _, word in words], dtype=np.int64),
    )


def _banned(
    words: _BadWords, rows: IntArray, positions: IntArray, history: TokenHistory
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Batch rows and token ids of the words that the next token would complete: their beginnings end the output."""
    ends, chosen = positions[words.index], rows[words.index]
    width = words.prefixes.shape[1]
    columns = np.maximum(ends[:, None] - np.arange(width, 0, -1), 0)
    tokens = history.token_ids[chosen[:, None], columns]
    is_there = ((tokens == words.prefixes) | (words.prefixes == _ANY)).all(axis=1)
    is_there &= ends - history.num_prompt_tokens[chosen] >= words.num_prefix
    return words.index[is_there], words.last[is_there]
