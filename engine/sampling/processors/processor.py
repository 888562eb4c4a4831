"""What a logits processor is, and what processors share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
import torch

from engine.contract.messages import SamplingParams
from engine.contract.step import IntArray
from engine.device.copies import upload
from engine.sampling.token_history import TokenHistory

LOWEST: Final = -1e28
"""Stands for logits of minus infinity and for NaN: below everything that a model computes."""

BAD_WORD: Final = -1e29
"""The end of a bad word: drawn only if nothing else may be."""

TOO_EARLY: Final = -1e30
"""A token that would end the output before ``min_tokens``: drawn only if nothing but it and bad words may be."""

NEVER: Final = 0
FOREVER: Final = np.iinfo(np.int32).max

Index = tuple[torch.Tensor, torch.Tensor]
T = TypeVar("T")


class LogitsProcessor(Protocol):
    """Changes logits before a token is chosen, for the rows whose requests ask for it.

    What it does to a row may depend on the row's parameters, its position and its tokens, never on other rows.
    """

    def set(self, row: int, sampling: SamplingParams, *, num_prompt_tokens: int) -> int:
        """Store what the new request in a row asks for; what the row's last request asked for is forgotten.

        Returns:
            The position from which on the row is left alone: ``NEVER`` if it is not concerned at all, ``FOREVER`` if
            it always is. A row that no processor changes takes the most likely token without a copy of its logits.
        """

    def reads_history(self, row: int) -> bool:
        """True when what ``apply`` does depends on the tokens that the row holds, its newest one included."""

    def apply(self, logits: torch.Tensor, rows: IntArray, positions: IntArray, history: TokenHistory) -> None:
        """Change, in place, the logits of the rows that are concerned.

        logits: [num_rows, vocab_size] float32, without NaN; rows: [num_rows], a row may stand there several times;
        positions: [num_rows] where each new token will stand, which is how many tokens the row holds before it.
        """


class PerBatch(Generic[T]):
    """What a batch of rows needs, put together again only when its rows change: most steps have those of the last."""

    def __init__(self, make: Callable[[IntArray, int, torch.device], T]) -> None:
        self._make = make
        self._last: tuple[bytes, T] | None = None

    def forget(self) -> None:
        """To be called when a row's parameters changed."""
        self._last = None

    def of(self, rows: IntArray, logits: torch.Tensor) -> T:
        """``make(rows, vocab_size, device)`` for these rows."""
        key = rows.tobytes()
        if self._last is None or self._last[0] != key:
            self._last = (key, self._make(rows, logits.shape[1], logits.device))
        return self._last[1]


def index_of(pairs: list[tuple[int, int]], device: torch.device) -> Index:
    """Pairs of (row of the batch, token id) as an index into logits."""
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return upload(table[0].copy(), device), upload(table[1].copy(), device)
