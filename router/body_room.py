"""Bounds the memory that request bodies take at once."""

from __future__ import annotations

import asyncio
from collections import deque

from router.errors import BodiesFullError


class BodyRoom:
    """A budget of ``max_bytes`` for all bodies. A body takes all bytes that it needs at once, or waits for its turn.

    Turns are first come, first served, so that small bodies do not starve a large one. Waiting bodies hold no room, so
    the admitted ones can always finish. Bodies of at most ``max_bytes`` in sum may wait, each for ``wait_s``.
    """

    def __init__(self, *, max_bytes: int, wait_s: float, retry_after_s: float) -> None:
        self._max_bytes = max_bytes
        self._wait_s = wait_s
        self._retry_after_s = retry_after_s
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.num_taken_bytes = 0
        self.num_waiting_bytes = 0

    async def take(self, num_bytes: int) -> None:
        """Take room, which the caller gives back.

        Raises:
            BodiesFullError: There is no room, and none becomes free in time.
        """
        if not self._waiting and self._fits(num_bytes):
            self.num_taken_bytes += num_bytes
            return
        if self._wait_s == 0 or self.num_waiting_bytes + num_bytes > self._max_bytes:
            raise self._error()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (num_bytes, turn)
        self._waiting.append(entry)
        self.num_waiting_bytes += num_bytes
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except TimeoutError:
            self._leave(entry)
            raise self._error() from None
        except asyncio.CancelledError:
            self._leave(entry)
            raise

    def give_back(self, num_bytes: int) -> None:
        """Give room back, and admit the bodies whose turn it is."""
        self.num_taken_bytes -= num_bytes
        self._let_in()

    def _leave(self, entry: tuple[int, asyncio.Future[None]]) -> None:
        """Remove a body that waited; it may just have been admitted."""
        if entry in self._waiting:
            self._waiting.remove(entry)
            self.num_waiting_bytes -= entry[0]
            self._let_in()
        else:
            self.give_back(entry[0])

    def _let_in(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            num_bytes, turn = self._waiting.popleft()
            self.num_waiting_bytes -= num_bytes
            self.num_taken_bytes += num_bytes
            if not turn.done():
                turn.set_result(None)

    def _fits(self, num_bytes: int) -> bool:
        return self.num_taken_bytes + num_bytes <= self._max_bytes

    def _error(self) -> BodiesFullError:
        return BodiesFullError(max_reading_bytes=self._max_bytes, retry_after_s=self._retry_after_s)
