"""Separates log-probabilities of an answer's content from those of its thinking, its tool calls and their markers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from router.text.logprob_trail import TokenEntry
from router.tools.turn import CallBegin, ContentText, TurnPart


class ContentEntries:
    """Holds entries until it is known what their tokens' text is, since the parser holds back possible markers.

    Parts do not give their position in the answer, so it is searched for in the text that is not attributed yet. New
    content is either at the start of that text, or near its end: markers and spaces come before it, and only text that
    the parser still holds back comes after it.
    """

    def __init__(self) -> None:
        self._waiting: list[TokenEntry] = []
        self._text = ""
        """The end of the text so far: what is not attributed to content or anything else yet."""
        self._num_characters = 0
        self._content_end = 0
        self._may_go_on = True

    def take(
        self, text: str, entries: Sequence[TokenEntry], parts: Sequence[TurnPart], *, is_thinking: bool, is_last: bool
    ) -> tuple[TokenEntry, ...]:
        """The content's entries, among the new ones and those that were held.

        Args:
            text: The next text of the answer.
            entries: The entries of this text.
            parts: What this text adds to the turn.
            is_thinking: Whether the answer is inside thinking after this text.
            is_last: Whether the answer ends here. Entries still held then belong to the content if it came last.
        """
        self._text += text
        self._num_characters += len(text)
        self._waiting += entries
        content = "".join(part.text for part in parts if isinstance(part, ContentText))
        found = self._content(content) if content else []
        if is_thinking or (parts and not isinstance(parts[-1], ContentText)):
            self._drop(parts[-1] if parts else None)
        elif parts:
            self._may_go_on = True
        if is_last and self._may_go_on:
            found += self._waiting
        return tuple(found)

    def _content(self, content: str) -> list[TokenEntry]:
        """The entries of tokens that overlap the content; entries before it are dropped."""
        place = 0 if self._text.startswith(content) else max(self._text.rfind(content), 0)
        start = self._num_characters - len(self._text) + place
        end = start + len(content)
        found: list[TokenEntry] = []
        kept: list[TokenEntry] = []
        for entry, entry_end in self._with_ends():
            if entry.start >= end:
                kept.append(entry)
            elif entry.start >= start or entry_end > start or entry.start < self._content_end:
                found.append(entry)
        self._waiting, self._content_end = kept, end
        self._text = self._text[place + len(content) :]
        return found

    def _drop(self, part: TurnPart | None) -> None:
        """Drop text and entries that are not content, up to the end of ``part``; all if its text is not found."""
        said = "" if part is None or isinstance(part, CallBegin) else part.text
        place = self._text.rfind(said) if said else -1
        self._text = self._text[place + len(said) :] if place >= 0 else ""
        start = self._num_characters - len(self._text)
        self._waiting = [entry for entry, end in self._with_ends() if entry.start >= start or end > start]
        self._may_go_on = False

    def _with_ends(self) -> Iterator[tuple[TokenEntry, int]]:
        """The held entries, each with the position where its text ends."""
        ends = (*(entry.start for entry in self._waiting[1:]), self._num_characters)
        return zip(self._waiting, ends, strict=False)
