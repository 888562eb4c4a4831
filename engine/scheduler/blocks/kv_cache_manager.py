"""Blocks for requests: prefix lookup, allocation, publication and release of whole block tables. Free of torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from engine.contract.block_hash import BlockHash
from engine.contract.messages import CacheReset
from engine.scheduler.blocks.block_pool import BlockPool
from engine.scheduler.blocks.cache_events import AllCleared, BlockRemoved, BlockStored, CacheEventLog
from engine.scheduler.blocks.prefix_index import PrefixIndex
from kv_transfer.protocols import EvictionTier

LIFETIME_SAMPLE = 64
"""One block in so many has the time from its publication to its eviction measured."""


@dataclass(slots=True)
class CacheLifetimes:
    """Sampled times from a block's publication to its eviction."""

    num_sampled: int = 0
    total_s: float = 0.0


class KVCacheManager:
    """The one owner of the block pool and the prefix index.

    Blocks freed while a step is in flight are *fenced*: they stay held until the newest step that was scheduled
    before the release has returned, because it may still write them.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        events: CacheEventLog | None = None,
        tier: EvictionTier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.lifetimes = CacheLifetimes()
        self._index = PrefixIndex(num_blocks)
        self._pool = BlockPool(num_blocks, self._index, self._withdraw_evicted)
        self._events = events
        self._tier = tier
        self._only_in_tier: set[BlockHash] = set()
        self._clock = clock
        self._published_at: dict[int, float] = {}
        self._fence: deque[tuple[int, list[int]]] = deque()
        self._num_fenced = 0
        self._newest_step_in_flight: int | None = None

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones that nobody holds included."""
        return self._pool.num_free

    @property
    def num_fenced(self) -> int:
        """Blocks that become free when the steps in flight have returned."""
        return self._num_fenced

    @property
    def pool(self) -> BlockPool:
        """The pool, for reading its counters."""
        return self._pool

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the KV of so many tokens."""
        return -(-num_tokens // self.block_size)

    def lookup(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the longest published prefix of a chain, not yet held."""
        return self._index.longest_prefix(hashes)

    def published(self) -> Iterator[BlockHash]:
        """All contents that can be found, here or where evicted blocks are kept."""
        return chain(self._index, self._only_in_tier)

    def is_published(self, block_hash: BlockHash) -> bool:
        """True when a block with this content can be found."""
        return block_hash in self._index

    def num_free_without(self, block_ids: Sequence[int]) -> int:
        """Blocks that can be allocated once these published ones are held."""
        return self._pool.num_free - self._pool.num_unheld(block_ids)

    def hold(self, block_ids: Sequence[int]) -> None:
        """Hold published blocks once more."""
        self._pool.touch(block_ids)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks; see ``BlockPool.allocate``."""
        return self._pool.allocate(num_blocks)

    @property
    def records_events(self) -> bool:
        """True when somebody mirrors the index: then every publication is followed by ``record_stored``."""
        return self._events is not None

    def publish(self, block_id: int, block_hash: BlockHash) -> bool:
        """Offer a held block whose KV is computed and confirmed; False when its content is already offered."""
        if not self._index.publish(block_id, block_hash):
            return False
        if block_id % LIFETIME_SAMPLE == 0:
            self._published_at[block_id] = self._clock()
        return True

    def record_stored(self, block_hash: BlockHash, parent: BlockHash, token_ids: tuple[int, ...]) -> None:
        """Tell the mirrors what ``publish`` just offered, unless it could be found here all the time."""
        if block_hash in self._only_in_tier:
            self._only_in_tier.remove(block_hash)
        elif self._events is not None:
            self._events.append(BlockStored(block_hash=block_hash, parent_hash=parent, token_ids=token_ids))

    def release(self, block_ids: list[int]) -> None:
        """Give a block table back, in table order; fenced while a step is in flight."""
        if self._newest_step_in_flight is None:
            self._pool.free(block_ids)
        elif block_ids:
            self._fence.append((self._newest_step_in_flight, block_ids))
            self._num_fenced += len(block_ids)

    def step_scheduled(self, step_id: int) -> None:
        """A step that may write any block held now is in flight."""
        self._newest_step_in_flight = step_id

    def step_returned(self, step_id: int) -> None:
        """A step has returned: blocks that waited for it, or for older ones, are free."""
        if self._newest_step_in_flight == step_id:
            self._newest_step_in_flight = None
        while self._fence and self._fence[0][0] <= step_id:
            block_ids = self._fence.popleft()[1]
            self._num_fenced -= len(block_ids)
            self._pool.free(block_ids)

    def reset(self) -> CacheReset:
        """Withdraw every published block; what is held stays held, unpublished. Nothing evicted comes back.

        Returns:
            How many blocks could be found until now, here and where evicted ones are kept.
        """
        num_blocks, num_host_blocks = len(self._index), 0
        self._index.clear()
        self._pool.drop_cached()
        self._published_at.clear()
        if self._tier is not None:
            num_host_blocks = self._tier.forget_evicted()
            self._only_in_tier.clear()
        if self._events is not None:
            self._events.append(AllCleared())
        return CacheReset(num_blocks=num_blocks, num_host_blocks=num_host_blocks)

    def check_integrity(self, tables: Sequence[Sequence[int]]) -> None:
        """Compare the pool with the block tables that exist.

        Raises:
            AssertionError: They disagree.
        """
        expected = [0] * self._pool.num_blocks
        for table in (*tables, *(block_ids for _, block_ids in self._fence)):
            for block_id in table:
                expected[block_id] += 1
        self._pool.check_integrity(expected)

    def _withdraw_evicted(self, block_ids: Sequence[int]) -> None:
        hashes = self._index.withdraw(block_ids)
        if self._published_at:
            self._sample_lifetimes(block_ids)
        lost = hashes if self._tier is None else self._tier.keep_evicted(block_ids, hashes)
        if self._events is not None:
            self._record_removed(hashes, [BlockHash(block_hash) for block_hash in lost])

    def _record_removed(self, evicted: Sequence[BlockHash], lost: Sequence[BlockHash]) -> None:
        """Tell the mirrors what can be found neither in the cache nor in the tier any more."""
        assert self._events is not None
        self._only_in_tier.update(evicted)
        for block_hash in lost:
            if block_hash not in self._only_in_tier:
                continue  # it is in the cache as well, or lay in the tier before anybody mirrored this cache
            self._only_in_tier.remove(block_hash)
            if block_hash not in self._index:
                self._events.append(BlockRemoved(block_hash=block_hash))

    def _sample_lifetimes(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            published_at = self._published_at.pop(block_id, None)
            if published_at is not None:
                self.lifetimes.num_sampled += 1
                self.lifetimes.total_s += self._clock() - published_at
