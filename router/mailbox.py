"""One request's news on their way from a replica's stream to whoever writes the answer."""

from __future__ import annotations

import asyncio

from engine.messages import TokenDelta


class Mailbox:
    """Many puts, one taker, one end. Holds at most what one request may generate, so it needs no bound of its own.

    All calls come from one event loop.
    """

    __slots__ = ("_error", "_items", "_waiter", "is_ended")

    def __init__(self) -> None:
        self._items: list[TokenDelta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self.is_ended = False

    def put(self, delta: TokenDelta) -> None:
        """Add one delta; after the end it is dropped."""
        if not self.is_ended:
            self._items.append(delta)
            self._wake()

    def end(self, error: Exception | None = None) -> None:
        """Nothing comes any more. Only the first call counts (I4)."""
        if not self.is_ended:
            self.is_ended = True
            self._error = error
            self._wake()

    async def take(self) -> list[TokenDelta]:
        """All that is waiting, at least one; an empty list at the end.

        Raises:
            Exception: The error given to ``end``, once everything before it was taken.
        """
        if not self._items and not self.is_ended:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        if not items and self._error is not None:
            raise self._error
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
