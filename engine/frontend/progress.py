"""Whether an engine goes on: what a watchdog looks at, since an open port says nothing of the steps behind it."""

from __future__ import annotations

import time
from collections.abc import Callable


class Progress:
    """Since when the engine's thread has been in the same turn, or has left what it was asked for untouched.

    Or since when its requests wait for nothing that is under way, however many turns it makes. Written by the engine's
    thread and by whoever posts commands; each of the moments has one writer at a time, and reading needs no lock. An
    idle engine that was asked for nothing makes no progress and owes none.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turn_since_s: float | None = None
        self._asked_since_s: float | None = None
        self._stuck_since_s: float | None = None

    def asked(self) -> None:
        """A command waits for the engine's thread."""
        if self._asked_since_s is None:
            self._asked_since_s = self._clock()

    def begin_turn(self) -> None:
        """The thread begins a turn: it takes the commands, and may step."""
        self._turn_since_s = self._clock()
        self._asked_since_s = None

    def end_turn(self, *, is_stuck: bool) -> None:
        """The thread ended a turn; ``is_stuck``: requests wait, and nothing is under way that could let them start."""
        if not is_stuck:
            self._stuck_since_s = None
        elif self._stuck_since_s is None:
            self._stuck_since_s = self._clock()

    def rest(self) -> None:
        """The thread has nothing to do, and waits."""
        self._turn_since_s = None

    @property
    def busy_s(self) -> float:
        """Seconds since the turn in progress began, something was asked for in vain, or requests wait for nothing.

        0 at rest.
        """
        moments = (self._turn_since_s, self._asked_since_s, self._stuck_since_s)
        since = [moment for moment in moments if moment is not None]
        return self._clock() - min(since) if since else 0.0
