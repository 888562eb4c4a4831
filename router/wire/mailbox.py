"""The queue of one request's tokens between a replica's stream and the code that writes the answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from engine.contract.messages import TokenDelta, joined

WRITE_COST_S = 2e-4
"""Twice the cost of waking one stream and writing one event, including the HTTP server's part (0.1 ms, measured on 2
cores). So writing takes at most half of the router's time, and leaves the rest to new requests."""


class Pacer:
    """Paces writes: between two writes to a stream passes at least the time of one write to every stream.

    Writing more often cannot bring any tokens earlier; streams would only wait for each other. With few streams, or
    with engines whose steps take longer than that, every token is written at once.
    """

    def __init__(self, *, max_delay_s: float) -> None:
        self._max_delay_s = max_delay_s
        self._due: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self.num_streams = 0

    @property
    def interval_s(self) -> float:
        """The least time between two writes to one stream."""
        return min(self._max_delay_s, self.num_streams * WRITE_COST_S)

    def wake_later(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` in the next round, at most one interval from now."""
        self._due.append(wake)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.interval_s, self._run_round)

    def _run_round(self) -> None:
        self._timer = None
        due, self._due = self._due, []
        for wake in due:
            wake()


class Mailbox:
    """A queue with one taker and one end. A request's output limit bounds it, so it needs no bound of its own.

    The taker is woken at the pace of ``pacer``, and at once for the first and the last tokens. With ``joins_deltas`` it
    gets all waiting deltas as one. All calls must come from one event loop, whose clock is used.
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
        """Hold back what waits until the next delta comes, until ``until_s``, or until the end; then call ``on_shown``.
        Does nothing after the end."""
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
        """End the queue. Only the first call counts."""
        if not self.is_ended:
            self._show()
            self.is_ended = True
            self._error = error
            if self._pacer is not None:
                self._pacer.num_streams -= 1
            self._wake()

    async def take(self) -> list[TokenDelta]:
        """Wait for deltas, and return all of them, at least one; an empty list at the end.

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
        """True if waiting deltas are due: they are not held and the pace allows it, or the queue has ended."""
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
