"""Finds stop strings in text that arrives in pieces; holds back text in which one may have begun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """What may be emitted now, and the stop string that ended the text, if one did."""

    text: str
    stop: str | None = None


class _Beginning:
    """Tracks how long a prefix of one stop string the text so far ends with, piece by piece.

    Each character is compared a few times at most, however much of the stop string has matched. The border table is
    built only as far as the match got, so that a stop string that never begins costs nothing.
    Source: Knuth, Morris, Pratt, Fast Pattern Matching in Strings, SIAM J. Comput. 1977
    """

    __slots__ = ("_borders", "_stop", "size")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = [0, 0]
        self.size = 0

    def shorter(self) -> int:
        """The length of the next shorter prefix that the text ends with."""
        return self._borders[self.size]

    def read(self, text: str) -> None:
        """Take new text; then ``size`` is the length of the stop string's prefix that the text ends with."""
        stop, borders, size, place = self._stop, self._borders, self.size, 0
        while place < len(text):
            if not size and (place := text.find(stop[0], place)) < 0:
                break
            while size and (size == len(stop) or stop[size] != text[place]):
                size = borders[size]
            if stop[size] == text[place]:
                size += 1
                if size == len(borders):
                    self._add_border()
            place += 1
        self.size = size

    def _add_border(self) -> None:
        """Add the border of the next longer prefix: its longest proper prefix that is also its suffix."""
        last = self._stop[len(self._borders) - 1]
        size = self._borders[-1]
        while size and self._stop[size] != last:
            size = self._borders[size]
        self._borders.append(size + 1 if self._stop[size] == last else 0)


class StopStrings:
    """Cuts one output at the first stop string that is complete.

    The first is the one that *ends* first, so that the result does not depend on how the text was cut into pieces; of
    several that end at the same place, the longest wins. The stop string itself is not emitted unless ``include``. One
    that ends in skipped text does not count, but one that only begins there does.
    """

    __slots__ = ("_beginnings", "_held", "_include", "_max_held", "_num_skipped", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._beginnings = [_Beginning(stop) for stop in self._stops]
        self._include = include
        self._max_held = max((len(stop) for stop in self._stops), default=1) - 1
        self._held = ""
        self._num_skipped = 0

    @property
    def are_any(self) -> bool:
        """True when there is something to look for."""
        return bool(self._stops)

    def push(self, text: str) -> StopMatch:
        """Take new text; return the text that certainly precedes any stop string."""
        if not self._stops:
            return StopMatch(text=text)
        new, text = text, self._held + text
        found = self._find(text)
        if found is not None:
            start, stop = found
            self._held = ""
            return StopMatch(text=text[: start + len(stop)] if self._include else text[:start], stop=stop)
        cut = self._hold(new, text)
        self._num_skipped = max(self._num_skipped - cut, 0)
        return StopMatch(text=text[:cut])

    def skip(self, text: str) -> str:
        """Take new text in which a stop string does not count; return the text that certainly precedes any."""
        new, text = text, self._held + text
        cut = self._hold(new, text)
        self._num_skipped = len(text) - cut
        return text[:cut]

    def finish(self) -> str:
        """The output ended without a stop string: return the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(self._num_skipped + 1 - len(stop), 0))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _hold(self, new: str, text: str) -> int:
        """Hold back the end of ``text`` in which a stop string may have begun, and return where it begins.

        ``text`` ends with ``new``.
        """
        cut = len(text) - self._num_held(new)
        self._held = text[cut:]
        return cut

    def _num_held(self, new: str) -> int:
        longest = 0
        for beginning in self._beginnings:
            beginning.read(new)
            size = beginning.size if beginning.size <= self._max_held else beginning.shorter()
            longest = max(longest, size)
        return longest
