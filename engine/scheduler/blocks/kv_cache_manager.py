"""Blocks for requests: prefix lookup, allocation, publication and release of whole block tables. Free of torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from engine.contract.block_hash import BlockHash, group_hash, is_first_group
from engine.contract.errors import OutOfBlocksError
from engine.contract.messages import CacheReset
from engine.scheduler.blocks.block_need import BlockNeed, BlockNeeds, CachedPrefix
from engine.scheduler.blocks.block_pool import BlockPool
from engine.scheduler.blocks.cache_events import AllCleared, BlockRemoved, BlockStored, CacheEventLog
from engine.scheduler.blocks.prefix_index import PrefixIndex
from kv_transfer.cache_groups import ABSENT_BLOCK, BlockTables, CacheGroups, held_blocks
from kv_transfer.protocols import EvictionTier

LIFETIME_SAMPLE = 64
"""One in this many blocks is sampled for its lifetime: the time from its publication to its eviction."""


@dataclass(slots=True)
class CacheLifetimes:
    """Sampled times from a block's publication to its eviction."""

    num_sampled: int = 0
    total_s: float = 0.0


class KVCacheManager:
    """The only owner of the block pool and the prefix index.

    Blocks freed while a step is in flight are *fenced*: they stay held until the newest step that was scheduled before
    their release has returned, because it may still write them.

    Any block may serve any KV cache group; its content is found by the hash of its tokens and its group. Events and
    ``published`` describe the first group only: that is enough for routers to know a prefix, without knowing of groups.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        windows: Sequence[int | None] = (None,),
        chunk_tokens: int = 1,
        events: CacheEventLog | None = None,
        tier: EvictionTier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.groups = CacheGroups(tuple(windows), block_size)
        self.has_windows = self.groups.has_windows
        self.needs = BlockNeeds(self.groups, chunk_tokens=chunk_tokens)
        self.lifetimes = CacheLifetimes()
        self._index = PrefixIndex(num_blocks)
        self.pool = BlockPool(num_blocks, self._index, self._withdraw_evicted, num_groups=len(self.groups.windows))
        """For others only to read its counters."""
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
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones that nobody holds included."""
        return self.pool.num_free

    @property
    def num_fenced(self) -> int:
        """Blocks that become free once the steps in flight have returned."""
        return self._num_fenced

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold the KV of ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def prefix(self, hashes: Sequence[BlockHash], *, looks_behind: bool = False) -> CachedPrefix:
        """The longest usable prefix: in each group, the blocks of it that the next position sees are cached.

        looks_behind: where groups have windows, also find what is cached behind the prefix.
        """
        groups, block_of = self.groups, self._index.block_of
        if groups.is_one_full_group:
            blocks = self._index.longest_prefix(hashes)
            return CachedPrefix(len(blocks), [blocks], hashes)
        num_blocks = groups.longest_prefix(
            len(hashes), 0, lambda group, index: block_of(group_hash(hashes[index], group)) is not None
        )
        tables: BlockTables = []
        for group in range(groups.num_groups):
            first = groups.first_block(group, num_blocks * self.block_size)
            found = [block_of(group_hash(block_hash, group)) for block_hash in hashes[first:num_blocks]]
            tables.append([ABSENT_BLOCK] * first + [block_id for block_id in found if block_id is not None])
        behind = self._behind(hashes[num_blocks:]) if looks_behind and self.has_windows else ()
        return CachedPrefix(num_blocks, tables, hashes, behind)

    def _behind(self, hashes: Sequence[BlockHash]) -> BlockTables:
        """The blocks with these contents, one table per group, ABSENT_BLOCK for those that are not cached."""
        columns = zip(*map(self.find_column, hashes), strict=True) if hashes else [()] * self.groups.num_groups
        return [[ABSENT_BLOCK if block_id is None else block_id for block_id in column] for column in columns]

    def find_column(self, block_hash: BlockHash) -> list[int | None]:
        """The published blocks with this content, one per group; None where there is none."""
        return [self._index.block_of(group_hash(block_hash, group)) for group in range(self.groups.num_groups)]

    def published(self) -> Iterator[BlockHash]:
        """Every content that can be found, in the cache or in a tier."""
        index = self._index if self.groups.num_groups == 1 else filter(is_first_group, self._index)
        return chain(index, self._only_in_tier)

    def num_free_without(self, block_ids: Sequence[int]) -> int:
        """Blocks that could be allocated once these published blocks are held."""
        return self.pool.num_free - self.pool.num_unheld(block_ids)

    def num_free_beside(self, need: BlockNeed) -> int:
        """Blocks that could be allocated once the cached blocks of ``need`` are held."""
        return self.num_free_without(need.held())

    def take(self, need: BlockNeed) -> BlockTables:
        """Hold and allocate what a request needs.

        Raises:
            OutOfBlocksError: There is not enough; nothing was taken.
        """
        cached, num_blocks = need.held(), need.num_blocks
        if num_blocks > self.num_free - len(cached) and num_blocks > self.num_free_without(cached):
            raise OutOfBlocksError(requested=num_blocks, free=self.num_free_without(cached))
        self.pool.touch(cached)
        fresh = self.pool.allocate_by_group(need.num_fresh)
        return need.filled(fresh)

    def hold(self, block_ids: Sequence[int]) -> None:
        """Hold published blocks once more."""
        self.pool.touch(block_ids)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks of the first group; see ``BlockPool.allocate``."""
        return self.pool.allocate(num_blocks)

    def allocate_by_group(self, num_blocks: Sequence[int]) -> BlockTables:
        """Take ``num_blocks`` of each group; see ``BlockPool.allocate``."""
        return self.pool.allocate_by_group(num_blocks)

    def publish(
        self, tables: Sequence[Sequence[int]], hashes: Sequence[BlockHash], parent: BlockHash, token_bytes: bytes
    ) -> None:
        """Publish held blocks with computed, confirmed KV: in each group, the blocks of the same consecutive tokens.

        Absent blocks are skipped, and so are those whose content is published already.

        Args:
            tables: Of each group, as many blocks as there are ``hashes``.
            hashes: The addresses of these tokens' blocks, the first of which follows ``parent``.
            token_bytes: The tokens as little-endian int32.
        """
        self._publish_group(tables[0], hashes, parent, token_bytes)
        for group, block_ids in enumerate(tables[1:], start=1):
            self._offer(block_ids, [group_hash(block_hash, group) for block_hash in hashes])

    def publish_one(
        self, block_ids: Sequence[int], block_hash: BlockHash, parent: BlockHash, token_bytes: bytes
    ) -> None:
        """Publish one block in each group: ``publish`` for decoding, where many requests fill a block in one step."""
        first = block_ids[0]
        if first != ABSENT_BLOCK and self._index.publish(first, block_hash):
            if first % LIFETIME_SAMPLE == 0:
                self._published_at[first] = self._clock()
            if self._events is not None:
                self._record_stored([BlockStored(block_hash, parent, token_bytes)])
        if len(block_ids) > 1:
            for group, block_id in enumerate(block_ids[1:], start=1):
                self._offer((block_id,), (group_hash(block_hash, group),))

    def _publish_group(
        self, block_ids: Sequence[int], hashes: Sequence[BlockHash], parent: BlockHash, token_bytes: bytes
    ) -> None:
        """Publish blocks of the first group, and tell the mirrors of those that could not be found before."""
        published = self._offer(block_ids, hashes)
        if self._events is not None and published:
            parents, num_bytes = (parent, *hashes), len(token_bytes) // len(hashes)
            self._record_stored(
                [
                    BlockStored(hashes[at], parents[at], token_bytes[at * num_bytes : (at + 1) * num_bytes])
                    for at in published
                ]
            )

    def _record_stored(self, stored: Sequence[BlockStored]) -> None:
        """Tell the mirrors of new blocks, except those that could be found in the tier all along."""
        assert self._events is not None
        if known := self._only_in_tier:
            new = [event for event in stored if event.block_hash not in known]
            known.difference_update(event.block_hash for event in stored)
            stored = new
        self._events.append(*stored)

    def _offer(self, block_ids: Sequence[int], hashes: Sequence[BlockHash]) -> list[int]:
        published = self._index.publish_each(block_ids, hashes)
        for at in published:
            if block_ids[at] % LIFETIME_SAMPLE == 0:
                self._published_at[block_ids[at]] = self._clock()
        return published

    def release(self, block_ids: list[int]) -> None:
        """Give a block table back, in table order; fenced while a step is in flight."""
        if self._newest_step_in_flight is None:
            self.pool.free(block_ids)
        elif block_ids:
            self._fence.append((self._newest_step_in_flight, block_ids))
            self._num_fenced += len(block_ids)

    def release_tables(self, tables: BlockTables) -> None:
        """Give back all block tables of a request; fenced while a step is in flight."""
        self.release(held_blocks(tables))

    def release_behind_window(self, block_ids: list[int]) -> None:
        """Give back blocks before the window of all computed positions: no step, in flight or later, reads them."""
        self.pool.free(block_ids)

    def step_scheduled(self, step_id: int) -> None:
        """Note that a step is in flight, which may write any block held now."""
        self._newest_step_in_flight = step_id

    def step_returned(self, step_id: int) -> None:
        """Note that a step has returned; blocks fenced for it or for older steps become free."""
        if self._newest_step_in_flight == step_id:
            self._newest_step_in_flight = None
        while self._fence and self._fence[0][0] <= step_id:
            block_ids = self._fence.popleft()[1]
            self._num_fenced -= len(block_ids)
            self.pool.free(block_ids)

    def reset(self) -> CacheReset:
        """Withdraw every published block. Held blocks stay held, unpublished; nothing evicted comes back from a tier.

        Returns:
            How many blocks could be found until now, in the cache and in tiers.
        """
        num_blocks, num_host_blocks = len(self._index), 0
        self._index.clear()
        self.pool.drop_cached()
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
        expected = [0] * self.pool.num_blocks
        for table in (*tables, *(block_ids for _, block_ids in self._fence)):
            for block_id in table:
                expected[block_id] += 1
        self.pool.check_integrity(expected)

    def _withdraw_evicted(self, block_ids: Sequence[int]) -> None:
        hashes = self._index.withdraw(block_ids)
        if self._published_at:
            self._sample_lifetimes(block_ids)
        if self._tier is not None:
            lost = self._tier.keep_evicted(block_ids, hashes)
            if self._events is not None:
                self._record_removed(hashes, [BlockHash(block_hash) for block_hash in lost])
        elif self._events is not None:
            self._events.append(*[BlockRemoved(block_hash) for block_hash in hashes if is_first_group(block_hash)])

    def _record_removed(self, evicted: Sequence[BlockHash], lost: Sequence[BlockHash]) -> None:
        """Tell the mirrors which contents can no longer be found, neither in the cache nor in the tier."""
        assert self._events is not None
        self._only_in_tier.update(filter(is_first_group, evicted))
        for block_hash in lost:
            if block_hash not in self._only_in_tier:
                continue  # it is in the cache too, or was in the tier before a mirror existed
            self._only_in_tier.remove(block_hash)
            if block_hash not in self._index:
                self._events.append(BlockRemoved(block_hash))

    def _sample_lifetimes(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            published_at = self._published_at.pop(block_id, None)
            if published_at is not None:
                self.lifetimes.num_sampled += 1
                self.lifetimes.total_s += self._clock() - published_at
