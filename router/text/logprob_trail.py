"""Keeps what is said of each token together with the text that the token brings."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from engine.contract.messages import TokenLogprobs


class TokenEntry(NamedTuple):
    """One output token's log-probabilities, and where its text begins in the output's text, in characters."""

    said: TokenLogprobs
    start: int


class LogprobTrail:
    """Entries wait until all of their token's text was emitted, the rest of a character that it begins included.

    So an entry comes with the text that its token ends, however long that is held back. Each token has one entry, also
    those without text and those of a stop string; what still waits at the end comes with the end.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, TokenEntry]] = deque()
        self._num_decoded = 0
        self._num_emitted = 0

    def push(self, said: TokenLogprobs, *, num_characters: int, is_incomplete: bool) -> None:
        """A token was decoded, to so many characters; ``is_incomplete`` tells that it ends amid a character."""
        start = self._num_decoded
        self._num_decoded += num_characters
        self._waiting.append((self._num_decoded + is_incomplete, TokenEntry(said, start)))

    def emit(self, num_characters: int) -> tuple[TokenEntry, ...]:
        """So many characters more are emitted: the entries that go with them."""
        self._num_emitted += num_characters
        ready: list[TokenEntry] = []
        while self._waiting and self._waiting[0][0] <= self._num_emitted:
            ready.append(self._waiting.popleft()[1])
        return tuple(ready)

    def finish(self) -> tuple[TokenEntry, ...]:
        """The output ended: all that is left."""
        left = tuple(entry for _, entry in self._waiting)
        self._waiting.clear()
        return left
