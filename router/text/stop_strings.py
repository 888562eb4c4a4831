"""Stop strings in text that arrives in pieces: nothing is emitted in which one may still begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """What may be emitted now, and the stop string that ended the text, if one did."""

    text: str
    stop: str | None = None


class _Beginning:
    """How much of one stop string the end of a text is, as the text comes piece by piece.

    Each character is compared a few times at most, however much of the stop string is there. The borders are made as
    far as the text got, so that a stop string that never begins costs nothing.
    Source: Knuth, Morris, Pratt, Fast Pattern Matching in Strings, SIAM J. Comput. 1977
    """

    __slots__ = ("_borders", "_stop", "size")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = [0, 0]
        self.size = 0

    def shorter(self) -> int:
        """The next shorter beginning that the end of the text is."""
        return self._borders[self.size]

    def read(self, text: str) -> None:
        """Take new text; ``size`` is then how many characters at the end the stop string begins with."""
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
        """The longest beginning of the next longer beginning that is also its end, itself aside."""
        last = self._stop[len(self._borders) - 1]
        size = self._borders[-1]
        while size and self._stop[size] != last:
            size = self._borders[size]
        self._borders.append(size + 1 if self._stop[size] == last else 0)


class StopStrings:
    """Cuts one output at the first stop string that is complete.

    First is the one that *ends* first, so that the result does not depend on how the text was cut into pieces; of
    several that end there, the longest. The stop string itself is not emitted unless ``include``. One that ends in
    text that was skipped does not count, but one that only begins there does.
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
        """Take new text; return what is certain to be before any stop string."""
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
        """Take new text in which no stop string may end; return what is certain to be before any."""
        new, text = text, self._held + text
        cut = self._hold(new, text)
        self._num_skipped = len(text) - cut
        return text[:cut]

    def finish(self) -> str:
        """The output ended without a stop string: return what was held back."""
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
        """Keep the end of a text, ``new`` at its end, in which a stop string may begin; return where that is."""
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
