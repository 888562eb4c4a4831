"""The interface of logits processors, and what they share."""

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
"""Replaces logits of minus infinity or NaN: below any logit that a model computes."""

BAD_WORD: Final = -1e29
"""Logit of the last token of a bad word: below LOWEST, so drawn only if no better token is possible."""

TOO_EARLY: Final = -1e30
"""Logit of a token that would end the output before ``min_tokens``: below BAD_WORD, so even bad words go first."""

NEVER: Final = 0
FOREVER: Final = np.iinfo(np.int32).max

Index = tuple[torch.Tensor, torch.Tensor]
T = TypeVar("T")


class LogitsProcessor(Protocol):
    """Changes the logits of rows whose requests ask for it, before a token is chosen.

    The change may depend on the row's parameters, position and tokens, never on other rows.
    """

    def set(self, row: int, sampling: SamplingParams, *, num_prompt_tokens: int) -> int:
        """Store what the new request in a row asks for, in place of the last request's settings.

        Returns:
            The first position at which the row is no longer changed: ``NEVER`` if the processor never changes it,
            ``FOREVER`` if it always does. A greedy row that no processor changes needs no copy of its logits.
        """

    def reads_history(self, row: int) -> bool:
        """True if ``apply`` depends on the row's tokens, the newest one included."""

    def apply(self, logits: torch.Tensor, rows: IntArray, positions: IntArray, history: TokenHistory) -> None:
        """Change the logits of the rows that ask for it, in place.

        logits: [num_rows, vocab_size] float32, without NaN; rows: [num_rows], may contain a row several times;
            positions: [num_rows] position of each new token, which equals the number of tokens before it.
        """


class PerBatch(Generic[T]):
    """Data derived from a batch's rows, cached until the rows change: most steps have the same rows as the last one."""

    def __init__(self, make: Callable[[IntArray, int, torch.device], T]) -> None:
        self._make = make
        self._last: tuple[bytes, T] | None = None

    def forget(self) -> None:
        """Call this when a row's parameters have changed."""
        self._last = None

    def of(self, rows: IntArray, logits: torch.Tensor) -> T:
        """``make(rows, vocab_size, device)`` for these rows."""
        key = rows.tobytes()
        if self._last is None or self._last[0] != key:
            self._last = (key, self._make(rows, logits.shape[1], logits.device))
        return self._last[1]


def index_of(pairs: list[tuple[int, int]], device: torch.device) -> Index:
    """(Batch row, token id) pairs as an index into logits."""
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return upload(table[0].copy(), device), upload(table[1].copy(), device)
