"""Stop strings in text that arrives in pieces: nothing is emitted in which one may still begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """What may be emitted now, and the stop string that ended the text, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """Cuts one output at the first stop string that is complete.

    First is the one that *ends* first, so that the result does not depend on how the text was cut into pieces; of
    several that end there, the longest. The stop string itself is not emitted unless ``include``. One that ends in
    text that was skipped does not count, but one that only begins there does.
    """

    __slots__ = ("_held", "_include", "_max_held", "_num_skipped", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
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
        text = self._held + text
        found = self._find(text)
        if found is not None:
            start, stop = found
            self._held = ""
            return StopMatch(text=text[: start + len(stop)] if self._include else text[:start], stop=stop)
        cut = self._hold(text)
        self._num_skipped = max(self._num_skipped - cut, 0)
        return StopMatch(text=text[:cut])

    def skip(self, text: str) -> str:
        """Take new text in which no stop string may end; return what is certain to be before any."""
        text = self._held + text
        cut = self._hold(text)
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

    def _hold(self, text: str) -> int:
        """Keep the end of a text in which a stop string may begin; return where that is."""
        cut = len(text) - self._num_held(text)
        self._held = text[cut:]
        return cut

    def _num_held(self, text: str) -> int:
        for size in range(min(self._max_held, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
