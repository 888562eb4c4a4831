"""What one router has not been told yet of an engine's prefix cache."""

from __future__ import annotations

import asyncio

from engine.messages import CacheNews

MAX_WAITING_BYTES = 1 << 20
"""A router that is further behind gets everything anew."""


class CacheFeed:
    """News in order, from a snapshot on. ``needs_snapshot`` says that the next message must begin with one.

    ``snapshot`` is one that was asked for and not told yet.
    """

    def __init__(self) -> None:
        self.needs_snapshot = True
        self.snapshot: asyncio.Task[CacheNews] | None = None
        self._waiting: list[CacheNews] = []
        self._num_bytes = 0

    def put(self, news: CacheNews) -> None:
        """Add what happened."""
        self._waiting.append(news)
        self._num_bytes += len(news.stored) + len(news.removed)
        if self._num_bytes > MAX_WAITING_BYTES:
            self.take()
            self.needs_snapshot = True

    def take(self) -> tuple[CacheNews, ...]:
        """All that waits."""
        taken = tuple(self._waiting)
        self._waiting.clear()
        self._num_bytes = 0
        return taken
