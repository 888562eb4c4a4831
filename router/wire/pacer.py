"""When the tokens of many streams are written: together with those that follow at once, never much later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

WRITE_COST_S = 2e-4
"""Twice what waking one stream and writing one event costs the router, its server's part included (0.1 ms, measured on
2 cores): writing takes half of the router's time at most, and leaves the rest to new requests."""


class Pacer:
    """Spaces the writes of each stream by the time that one write to every stream takes.

    Writing more often than that cannot make anybody's tokens come earlier: it only makes the streams wait for each
    other. With few streams, or engines whose steps take longer, every token is written at once.
    """

    def __init__(self, *, max_delay_s: float) -> None:
        self._max_delay_s = max_delay_s
        self._due: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self.num_streams = 0

    @property
    def interval_s(self) -> float:
        """Shortest time between two writes to one stream."""
        return min(self._max_delay_s, self.num_streams * WRITE_COST_S)

    def wake_later(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` with the next round, at most one interval from now."""
        self._due.append(wake)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.interval_s, self._run_round)

    def _run_round(self) -> None:
        self._timer = None
        due, self._due = self._due, []
        for wake in due:
            wake()
