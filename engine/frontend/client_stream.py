"""What waits to be read by one client: all deltas since it last looked, taken at once."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence

from engine.contract.messages import FinishReason, RequestError, TokenDelta
from engine.frontend.feeds import CacheFeed

ENGINE_DEAD = RequestError(code="engine_dead", message="the engine stopped working; the request was not finished")


MESSAGE_GAP_S = 0.004
"""Steps that follow each other faster than this share a message: its way costs the router as much as tens of tokens."""


class ClientStream:
    """A buffer between the engine's steps and one reader, on one event loop.

    A reader slower than the engine gets several steps in one take; what waits is bounded by what the client's own
    requests may generate. ``cache`` is there for a router that mirrors the prefix cache; its changes go with the next
    message, whenever that is. Between two takes are at least ``min_gap_s``, unless a request's first tokens or its
    hand-over wait.
    """

    def __init__(self, *, cache: CacheFeed | None = None, min_gap_s: float = 0.0) -> None:
        self.cache = cache
        self._min_gap_s = min_gap_s
        self._taken_at_s = -math.inf
        self._is_pressing = asyncio.Event()
        self._waiting: list[TokenDelta] = []
        self._news = asyncio.Event()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """True when nothing will come any more and everything was taken."""
        return self._is_closed and not self._waiting

    def put(self, deltas: Sequence[TokenDelta]) -> None:
        """Add deltas in order."""
        self._waiting.extend(deltas)
        self._news.set()
        if self._min_gap_s and not self._is_pressing.is_set() and any(map(_is_pressing, deltas)):
            self._is_pressing.set()

    def close(self) -> None:
        """End the stream once what waits was taken."""
        self._is_closed = True
        self._news.set()
        self._is_pressing.set()

    async def take(self, *, timeout_s: float | None = None) -> list[TokenDelta]:
        """Wait until something is there, at most ``timeout_s``, and take it all; empty on timeout or close."""
        if not self._news.is_set():
            try:
                # Not wait_for: before Python 3.12 it loses a cancellation that comes together with new tokens.
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
            except TimeoutError:
                return []
        if self._min_gap_s:
            await self._keep_gap()
        taken, self._waiting = self._waiting, []
        if not self._is_closed:
            self._news.clear()
            self._is_pressing.clear()
        return taken

    async def _keep_gap(self) -> None:
        now_s = asyncio.get_running_loop().time()
        left_s = self._taken_at_s + self._min_gap_s - now_s
        if left_s > 0 and not self._is_pressing.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._is_pressing.wait()
            now_s = asyncio.get_running_loop().time()
        self._taken_at_s = now_s


def _is_pressing(delta: TokenDelta) -> bool:
    """True for what somebody waits for before anything else can happen: first tokens, and where the KV is."""
    return delta.num_cached_tokens is not None or delta.kv_transfer is not None


def dead_delta(request_id: str) -> TokenDelta:
    """The end of a request whose engine died."""
    return TokenDelta(request_id=request_id, token_ids=(), finish_reason=FinishReason.ERROR, error=ENGINE_DEAD)
