"""The messages to one router over its connection, written by the engine's own thread as far as the reader keeps up.

A message sent by way of the event loop wakes the loop twice, once for the step and once to write, while another thread
computes on every core. The engine's thread never waits here: while the reader is behind, tokens are kept, and go in one
message when it has caught up.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.contract.messages import CacheChanges, LoadReport, StepMessage, TokenDelta, Told
from engine.contract.step_frame import pack_step
from engine.frontend.client_stream import MESSAGE_GAP_S, is_pressing
from engine.frontend.feeds import CacheFeed


class FrameSink(Protocol):
    """A connection to a router (``router.wire.frame_connection.FrameConnection``)."""

    @property
    def is_behind(self) -> bool:
        """True while the reader has not taken everything."""

    def send(self, frame: bytes) -> None:
        """Send a frame without waiting; from any thread."""

    async def drained(self) -> None:
        """Return when the reader has taken everything, or is gone."""


class Outbox:
    """One client's messages, in the order of the engine's steps. May be used from any thread, unless a method says
    otherwise.

    Two messages are at least ``min_gap_s`` apart, unless a request's first tokens or its hand-over wait; a load report
    on its own (:meth:`report`) does not wait. ``cache`` is set for a router that mirrors the prefix cache: changes go
    with the next message.
    """

    def __init__(
        self,
        sink: FrameSink,
        load: Callable[[], LoadReport],
        *,
        cache: CacheFeed | None = None,
        min_gap_s: float = MESSAGE_GAP_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self._sink = sink
        self._load = load
        self._min_gap_s = min_gap_s
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: list[TokenDelta] = []
        self._told: list[Told] = []
        self._is_pressing = False
        self._has_news = False
        self._is_due = False
        self._sent_at_s = -math.inf
        self._flushing: asyncio.Task[None] | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()

    @property
    def wants_snapshot(self) -> bool:
        """True when the router needs a snapshot of the prefix cache, and could take one now."""
        return self.cache is not None and self.cache.needs_snapshot and not self._sink.is_behind

    def put(self, deltas: Sequence[TokenDelta], told: Sequence[Told] = ()) -> None:
        """Send these after all earlier ones: now, or when the gap has passed and the reader has caught up.

        An empty put still sends a message: the load has changed.
        """
        with self._lock:
            self._has_news = True
            self._waiting += deltas
            self._told += told
            self._is_pressing = self._is_pressing or any(map(is_pressing, deltas))
            if not self._sink.is_behind and (self._is_pressing or self._left_s() <= 0):
                self._send()
            elif not self._is_due:
                self._is_due = True
                with contextlib.suppress(RuntimeError):  # the loop is closed, and there is no reader left
                    self._loop.call_soon_threadsafe(self._wait_and_flush)

    def put_cache(self, changes: CacheChanges) -> None:
        """Send these changes with the next message."""
        with self._lock:
            if self.cache is not None:
                self.cache.put(changes)

    def tell_snapshot(self, snapshot: CacheChanges) -> None:
        """Send a snapshot of the prefix cache; if the reader is behind, a new one must be made later instead.

        Either way, changes that waited are dropped: the next snapshot has them.
        """
        with self._lock:
            if self.cache is None:
                return
            self.cache.take()
            self.cache.needs_snapshot = self._sink.is_behind
            if not self.cache.needs_snapshot:
                self._send(snapshot)

    def report(self) -> None:
        """Send the load, and whatever waits, unless the reader is behind."""
        with self._lock:
            if not self._sink.is_behind:
                self._send()

    def close(self) -> None:
        """Send what waits; nothing is sent afterwards. To be called on the event loop."""
        with self._lock:
            if self._waiting:
                self._send()  # even if the reader is behind: this is the last message
        if not self._closed.done():
            self._closed.set_result(None)

    async def has_closed(self, *, timeout_s: float) -> bool:
        """Wait until it is closed, at most ``timeout_s``; returns whether it is. On the event loop."""
        await asyncio.wait((self._closed,), timeout=timeout_s)
        return self._closed.done()

    def _left_s(self) -> float:
        return self._sent_at_s + self._min_gap_s - self._clock()

    def _send(self, *snapshot: CacheChanges) -> None:
        """Send what waits, after a snapshot of the prefix cache if one is given. The caller holds the lock."""
        deltas, self._waiting, self._is_pressing = tuple(self._waiting), [], False
        told, self._told, self._has_news = tuple(self._told), [], False
        self._sent_at_s = self._clock()
        cache = self.cache.take() if self.cache is not None and not self.cache.needs_snapshot else ()
        message = StepMessage(deltas=deltas, load=self._load(), cache=(*snapshot, *cache), told=told)
        self._sink.send(pack_step(message))

    def _wait_and_flush(self) -> None:
        """Try again when sending may be possible. On the event loop, like the methods below."""
        if self._sink.is_behind:
            self._flushing = self._loop.create_task(self._flush_when_taken())
        else:
            self._loop.call_later(max(0.0, self._left_s()), self._flush)

    async def _flush_when_taken(self) -> None:
        await self._sink.drained()
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            if not self._has_news:
                self._is_due = False
            elif self._sink.is_behind or self._left_s() > 0:
                self._wait_and_flush()
            else:
                self._is_due = False
                self._send()
