"""The prefix cache's index as a router rebuilds it from events."""

from __future__ import annotations

from engine.contract.block_hash import BlockHash, hash_block
from engine.scheduler.blocks.cache_events import BlockRemoved, BlockStored, CacheEventBatch


def mirrored(batch: CacheEventBatch, mirror: set[BlockHash] | None = None) -> set[BlockHash]:
    """The index as a router rebuilds it."""
    mirror = set() if mirror is None else mirror
    for event in batch.events:
        if isinstance(event, BlockStored):
            assert event.block_hash not in mirror
            assert event.block_hash == hash_block(event.parent_hash, event.token_bytes)
            mirror.add(event.block_hash)
        elif isinstance(event, BlockRemoved):
            mirror.remove(event.block_hash)
        else:
            mirror.clear()
    return mirror
