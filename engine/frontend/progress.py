"""Whether an engine makes progress, for a watchdog: an open port says nothing about the steps behind it."""

from __future__ import annotations

import time
from collections.abc import Callable


class Progress:
    """Measures how long the engine's thread has been stuck in one turn, or has left commands unanswered.

    It also measures how long requests have waited with nothing under way that could let them start, however many turns
    the thread makes. Written by the engine's thread and by threads that post commands. Each time stamp has one writer
    at a time, so reading needs no lock. An idle engine without commands makes no progress and need not.
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
        """The thread begins a turn: it takes the commands, and may make a step."""
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
    def busy_since_s(self) -> float | None:
        """When the present turn began, an unanswered command came, or requests began to wait for nothing, whichever was
        first. None when idle.
        """
        moments = (self._turn_since_s, self._asked_since_s, self._stuck_since_s)
        return min((moment for moment in moments if moment is not None), default=None)

    @property
    def busy_s(self) -> float:
        """Seconds since then; 0 when idle."""
        since_s = self.busy_since_s
        return 0.0 if since_s is None else self._clock() - since_s
