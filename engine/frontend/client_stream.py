"""The buffer of one client's deltas: all since the client's last read, taken at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from engine.contract.messages import FinishReason, RequestError, TokenDelta, Told
from engine.frontend.feeds import CacheFeed

ENGINE_DEAD = RequestError(code="engine_dead", message="the engine stopped before the request was finished")


MESSAGE_GAP_S = 0.004
"""Steps less than this apart share a message: sending one costs the router as much as tens of tokens."""


class ClientStream:
    """A buffer between the engine's steps and one reader, on one event loop.

    A reader slower than the engine gets several steps in one take. The buffer is bounded by what the client's own
    requests may generate. ``cache`` is set for a router that mirrors the prefix cache; changes go with the next
    message, whenever that is. Two takes are at least ``min_gap_s`` apart, unless a request's first tokens or its
    hand-over wait.
    """

    def __init__(self, *, cache: CacheFeed | None = None, min_gap_s: float = 0.0) -> None:
        self.cache = cache
        self._min_gap_s = min_gap_s
        self._taken_at_s = -math.inf
        self._waiting: list[TokenDelta] = []
        self._told: list[Told] = []
        self._has_arrived = False
        self._is_pressing = False
        self._is_closed = False
        self._reader: asyncio.Future[None] | None = None
        self._reader_keeps_gap = False

    @property
    def is_closed(self) -> bool:
        """True when no more will come and everything was taken."""
        return self._is_closed and not self._waiting

    def put(self, deltas: Sequence[TokenDelta], told: Sequence[Told] = ()) -> None:
        """Add deltas in order, and reports on their requests; without any, the reader still wakes to tell the load."""
        self._waiting.extend(deltas)
        self._told.extend(told)
        self._has_arrived = True
        if self._min_gap_s and not self._is_pressing:
            self._is_pressing = any(map(is_pressing, deltas))
        self._wake()

    def close(self) -> None:
        """End the stream after what waits has been taken."""
        self._is_closed = self._has_arrived = self._is_pressing = True
        self._wake()

    async def take(self, *, timeout_s: float | None = None) -> list[TokenDelta]:
        """Wait at most ``timeout_s`` until something has arrived, and take it all; empty on timeout or close."""
        if not self._has_arrived:
            await self._wait(timeout_s, keeps_gap=False)
            if not self._has_arrived:
                return []
        if self._min_gap_s:
            await self._keep_gap()
        taken, self._waiting = self._waiting, []
        if not self._is_closed:
            self._has_arrived = self._is_pressing = False
        return taken

    def take_told(self) -> tuple[Told, ...]:
        """The reports on the requests whose deltas were just taken."""
        told, self._told = tuple(self._told), []
        return told

    async def _keep_gap(self) -> None:
        now_s = asyncio.get_running_loop().time()
        left_s = self._taken_at_s + self._min_gap_s - now_s
        if left_s > 0 and not self._is_pressing:
            await self._wait(left_s, keeps_gap=True)
            now_s = asyncio.get_running_loop().time()
        self._taken_at_s = now_s

    async def _wait(self, timeout_s: float | None, *, keeps_gap: bool) -> None:
        """Wait until something arrives, with ``keeps_gap`` something pressing, or until the timeout.

        A message costs one future and one timer here; asyncio's own means would create several times as many objects.
        """
        loop = asyncio.get_running_loop()
        self._reader, self._reader_keeps_gap = loop.create_future(), keeps_gap
        timer = loop.call_later(timeout_s, _set_done, self._reader) if timeout_s is not None else None
        try:
            await self._reader
        finally:
            self._reader = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._reader is not None and (self._is_pressing or not self._reader_keeps_gap):
            _set_done(self._reader)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def is_pressing(delta: TokenDelta) -> bool:
    """True for deltas that others wait for before they can go on: first tokens, and hand-overs."""
    return delta.num_cached_tokens is not None or delta.kv_transfer is not None


def dead_delta(request_id: str) -> TokenDelta:
    """The last delta of a request whose engine died."""
    return TokenDelta(request_id=request_id, token_ids=(), finish_reason=FinishReason.ERROR, error=ENGINE_DEAD)
