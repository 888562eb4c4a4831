"""Keeps each token's log-probabilities together with the token's text."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from engine.contract.messages import TokenLogprobs


class TokenEntry(NamedTuple):
    """One output token's log-probabilities, and where its text begins in the output's text, in characters."""

    said: TokenLogprobs
    start: int


class LogprobTrail:
    """Holds an entry until all text of its token was emitted, including the rest of a character that it begins.

    So an entry is emitted with the last of its token's text, however long that is held back. Each token has one entry,
    even without text or inside a stop string. Entries that are still held at the end are emitted then.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, TokenEntry]] = deque()
        self._num_decoded = 0
        self._num_emitted = 0

    def push(self, said: TokenLogprobs, *, num_characters: int, is_incomplete: bool) -> None:
        """Note that a token was decoded to ``num_characters``; ``is_incomplete``: it ends inside a character."""
        start = self._num_decoded
        self._num_decoded += num_characters
        self._waiting.append((self._num_decoded + is_incomplete, TokenEntry(said, start)))

    def emit(self, num_characters: int) -> tuple[TokenEntry, ...]:
        """Note that ``num_characters`` more are emitted, and return the entries that are complete with them."""
        self._num_emitted += num_characters
        ready: list[TokenEntry] = []
        while self._waiting and self._waiting[0][0] <= self._num_emitted:
            ready.append(self._waiting.popleft()[1])
        return tuple(ready)

    def finish(self) -> tuple[TokenEntry, ...]:
        """The output ended: return all remaining entries."""
        left = tuple(entry for _, entry in self._waiting)
        self._waiting.clear()
        return left
