"""Tells the log-probabilities of an answer's content from those of its thinking, its calls and what marks them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from router.text.logprob_trail import TokenEntry
from router.tools.turn import CallBegin, ContentText, TurnPart


class ContentEntries:
    """Entries wait until it is known what their tokens' text is: a parser holds back what may be a marker.

    Parts do not say where in the answer they stand. What was not told before either goes on with the content, or ends
    with it, but for what is still held back: markers and spaces come first. So it is looked for there.
    """

    def __init__(self) -> None:
        self._waiting: list[TokenEntry] = []
        self._text = ""
        """What is not known to be anything yet, the end of all text so far."""
        self._num_characters = 0
        self._content_end = 0
        self._may_go_on = True

    def take(
        self, text: str, entries: Sequence[TokenEntry], parts: Sequence[TurnPart], *, is_thinking: bool, is_last: bool
    ) -> tuple[TokenEntry, ...]:
        """The entries that are the content's, of these and of those that wait.

        Args:
            text: More of the answer.
            entries: Those that come with it.
            parts: What it adds to the turn.
            is_thinking: Whether the answer is amid thinking behind it.
            is_last: Whether the answer ends with it. What then waits belongs to the content where that came last.
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
        """The entries of tokens that have a part in the content; those before it are dropped."""
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
        """Forget what was not content, up to the end of a part that is none; all where that is not found."""
        said = "" if part is None or isinstance(part, CallBegin) else part.text
        place = self._text.rfind(said) if said else -1
        self._text = self._text[place + len(said) :] if place >= 0 else ""
        start = self._num_characters - len(self._text)
        self._waiting = [entry for entry, end in self._with_ends() if entry.start >= start or end > start]
        self._may_go_on = False

    def _with_ends(self) -> Iterator[tuple[TokenEntry, int]]:
        """The entries that wait, and where the text of each ends."""
        ends = (*(entry.start for entry in self._waiting[1:]), self._num_characters)
        return zip(self._waiting, ends, strict=False)
