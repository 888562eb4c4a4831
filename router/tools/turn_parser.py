"""Parsers that read an answer's text piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from router.tools.turn import ContentText, TurnPart


class TurnParser(Protocol):
    """Parses the text of one answer into parts of the turn. The result does not depend on how the text is cut."""

    @property
    def is_thinking(self) -> bool:
        """True while the text is thinking, before the answer."""

    def push(self, text: str) -> Iterator[TurnPart]:
        """Take more text; yield the parts that are certain now."""

    def finish(self) -> Iterator[TurnPart]:
        """The text ended: yield the parts that were held back. Call once."""


class PlainParser:
    """All text is content."""

    @property
    def is_thinking(self) -> bool:
        """Never."""
        return False

    def push(self, text: str) -> Iterator[TurnPart]:
        """The text unchanged."""
        if text:
            yield ContentText(text)

    def finish(self) -> Iterator[TurnPart]:
        """Nothing is held back."""
        yield from ()


class ContentGate:
    """Passes content on, without the format's own spaces: before calls, and after calls if there was no content.

    Spaces are held back until the next text. At the end they count as content if the answer has no calls.
    """

    __slots__ = ("_has_calls", "_has_said", "_spaces")

    def __init__(self) -> None:
        self._spaces = ""
        self._has_calls = self._has_said = False

    def content(self, text: str) -> Iterator[TurnPart]:
        """More content."""
        whole = self._spaces + text
        if self._has_calls and not self._has_said:
            whole = whole.lstrip()
        kept = whole.rstrip()
        self._spaces = whole[len(kept) :]
        if kept:
            self._has_said = True
            yield ContentText(kept)

    def begin_call(self) -> None:
        """A call begins: drop the spaces before it."""
        self._has_calls = True
        self._spaces = ""

    def finish(self) -> Iterator[TurnPart]:
        """Yield trailing spaces, if they count as content."""
        if self._spaces and not self._has_calls:
            yield ContentText(self._spaces)


def num_held(text: str, *markers: str) -> int:
    """Number of characters at the end of a text that may be the start of a marker."""
    longest = max((len(item) for item in markers), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(item.startswith(tail) for item in markers):
            return size
    return 0
