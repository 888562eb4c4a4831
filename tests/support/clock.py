"""A clock that moves when a test says so."""

from __future__ import annotations


class ManualClock:
    """A clock: calling it returns the time."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
