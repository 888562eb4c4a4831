"""One request's tokens on their way from a replica's stream to whoever writes the answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from engine.contract.messages import TokenDelta, joined

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


class Mailbox:
    """Many puts, one taker, one end. Holds at most what one request may generate, so it needs no bound of its own.

    The taker is woken at the pace that ``pacer`` allows, and at once for the first and the last tokens. With
    ``joins_deltas`` it then gets what waits as one delta. All calls come from one event loop, whose time it goes by.
    """

    __slots__ = (
        "_error",
        "_hold",
        "_is_due",
        "_items",
        "_on_shown",
        "_pacer",
        "_taken_at_s",
        "_waiter",
        "is_ended",
        "joins_deltas",
    )

    def __init__(self, pacer: Pacer | None = None) -> None:
        self._items: list[TokenDelta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._pacer = pacer
        self._hold: asyncio.TimerHandle | None = None
        self._on_shown: Callable[[], None] | None = None
        self._is_due = False
        self._taken_at_s = -math.inf  # no clock begins there
        self.is_ended = False
        self.joins_deltas = False
        if pacer is not None:
            pacer.num_streams += 1

    def put(self, delta: TokenDelta) -> None:
        """Add one delta; after the end it is dropped."""
        if not self.is_ended:
            self._show()
            self._items.append(delta)
            if self._waiter is not None and (not self._is_due or delta.finish_reason is not None):
                self._wake_in_time()

    def hold(self, *, until_s: float, on_shown: Callable[[], None]) -> None:
        """What waits is taken with what comes next, or at ``until_s``, or when nothing more comes; then ``on_shown`` is
        called. Nothing is held after the end."""
        if not self.is_ended:
            self._hold, self._on_shown = asyncio.get_running_loop().call_at(until_s, self._show), on_shown

    def _show(self) -> None:
        if self._hold is None or self._on_shown is None:
            return
        self._hold.cancel()
        on_shown, self._hold, self._on_shown = self._on_shown, None, None
        on_shown()
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """Nothing comes any more. Only the first call counts."""
        if not self.is_ended:
            self._show()
            self.is_ended = True
            self._error = error
            if self._pacer is not None:
                self._pacer.num_streams -= 1
            self._wake()

    async def take(self) -> list[TokenDelta]:
        """All that is waiting, at least one; an empty list at the end.

        Raises:
            Exception: The error given to ``end``, once everything before it was taken.
        """
        while not self.is_ended and not (self._items and self._is_time()):
            self._waiter = asyncio.get_running_loop().create_future()
            if self._items and not self._is_due and self._hold is None:
                self._wake_in_time()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._taken_at_s = asyncio.get_running_loop().time()
        items, self._items = self._items, []
        if not items and self._error is not None:
            raise self._error
        return [joined(items)] if self.joins_deltas and len(items) > 1 else items

    def _is_time(self) -> bool:
        """True when what waits should be taken now: nobody holds it, and the pace allows it, or nothing more comes."""
        if self._hold is not None:
            return False
        if self._pacer is None or self._items[-1].finish_reason is not None:
            return True
        return asyncio.get_running_loop().time() - self._taken_at_s >= self._pacer.interval_s

    def _wake_in_time(self) -> None:
        if self._pacer is None or self._is_time():
            self._wake()
        else:
            self._is_due = True
            self._pacer.wake_later(self._wake_when_due)

    def _wake_when_due(self) -> None:
        self._is_due = False
        self._taken_at_s = -math.inf  # no clock begins there
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
