"""Cache events as routers get them: keys only, and of each block only what became of it at last. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable

from engine.block_hash import BlockHash, block_key
from engine.core.cache_events import AllCleared, BlockStored, CacheEventBatch
from engine.messages import CacheNews


def cache_news(batch: CacheEventBatch) -> CacheNews:
    """What a batch of events comes to."""
    is_stored: dict[bytes, bool] = {}
    has_cleared = False
    for event in batch.events:
        if isinstance(event, AllCleared):
            is_stored.clear()
            has_cleared = True
        else:
            is_stored[block_key(event.block_hash)] = isinstance(event, BlockStored)
    return CacheNews(
        first_sequence=batch.first_sequence,
        next_sequence=batch.next_sequence,
        stored=b"".join([key for key, stored in is_stored.items() if stored]),
        removed=b"".join([key for key, stored in is_stored.items() if not stored]),
        is_snapshot=has_cleared,
    )


def cache_snapshot(cached: Iterable[BlockHash], *, next_sequence: int) -> CacheNews:
    """All that is cached, after the events before ``next_sequence``."""
    stored = b"".join(map(block_key, cached))
    return CacheNews(first_sequence=0, next_sequence=next_sequence, stored=stored, is_snapshot=True)
