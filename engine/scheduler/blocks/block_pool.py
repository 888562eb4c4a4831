"""The KV blocks: reference counts, free blocks, and cached blocks in eviction order. Free of torch."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import compress

from engine.contract.errors import OutOfBlocksError
from engine.scheduler.blocks.prefix_index import PrefixIndex


class BlockPool:
    """All blocks of one KV cache.

    A block is *held* (reference count > 0), *cached* (published, held by nobody, evictable) or *free*. Blocks without
    content are handed out before any cached block is evicted. Cached blocks are evicted least recently used first; of
    one chain, the tail goes before the head, because ``free`` queues a table from its end. With several KV cache
    groups, the pool knows which group each block serves, or served last.

    ``num_used``: only so many blocks, the first ones, were ever handed out. Fresh blocks are taken in their order.
    """

    def __init__(
        self,
        num_blocks: int,
        index: PrefixIndex,
        on_evict: Callable[[Sequence[int]], object],
        *,
        num_groups: int = 1,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self.num_allocated = 0
        self.num_used = 0
        self._index = index
        self._on_evict = on_evict
        self._num_refs: list[int] = [0] * num_blocks
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._group_of: list[int] | None = [0] * num_blocks if num_groups > 1 else None
        self._num_held_of = [0] * num_groups

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: without content, or cached and held by nobody."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that hold a published prefix and that nobody holds."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    @property
    def num_held_by_group(self) -> tuple[int, ...]:
        """Blocks that somebody holds, by the KV cache group that they serve."""
        return (self.num_held,) if self._group_of is None else tuple(self._num_held_of)

    def num_refs(self, block_id: int) -> int:
        """The reference count of a block."""
        return self._num_refs[block_id]

    def num_unheld(self, block_ids: Iterable[int]) -> int:
        """How many of these published blocks nobody holds. Those are free blocks, and ``touch`` would take them."""
        return sum(map(self._cached.__contains__, block_ids))

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks, evicting cached prefixes oldest first.

        Returns:
            Block ids, each with reference count 1, owned by the caller until ``free``.

        Raises:
            OutOfBlocksError: Fewer than ``num_blocks`` are free; nothing was taken.
        """
        free = self._free
        missing = num_blocks - len(free)
        if missing > 0:
            self._evict(missing, num_blocks)
        if num_blocks == 0:
            return []
        block_ids = free[-num_blocks:]
        del free[-num_blocks:]
        if block_ids[0] >= self.num_used:  # the first one, if any, was never handed out
            self.num_used = block_ids[0] + 1
        num_refs = self._num_refs
        for block_id in block_ids:
            num_refs[block_id] = 1
        self.num_allocated += num_blocks
        if self._group_of is not None:
            self._assign(block_ids, 0)
        return block_ids

    def allocate_by_group(self, num_blocks: Sequence[int]) -> list[list[int]]:
        """Take ``num_blocks`` of each KV cache group.

        Raises:
            OutOfBlocksError: Fewer than the sum are free; nothing was taken.
        """
        block_ids = self.allocate(sum(num_blocks))
        if len(num_blocks) == 1:
            return [block_ids]
        tables: list[list[int]] = []
        for group, num in enumerate(num_blocks):
            tables.append(block_ids[:num])
            del block_ids[:num]
            if group:
                self._num_held_of[0] -= num
                self._assign(tables[-1], group)
        return tables

    def touch(self, block_ids: Iterable[int]) -> None:
        """Hold published blocks once more; cached ones leave the eviction queue."""
        num_refs, cached = self._num_refs, self._cached
        for block_id in block_ids:
            if num_refs[block_id] == 0:
                del cached[block_id]
                if self._group_of is not None:
                    self._num_held_of[self._group_of[block_id]] += 1
            num_refs[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Give a block table back, in table order; published blocks stay findable until they are evicted."""
        num_refs, cached, free, hash_of = self._num_refs, self._cached, self._free, self._index.hash_of
        if self._group_of is not None:
            self._count_given_up(block_ids, self._group_of)
        for block_id in reversed(block_ids):
            left = num_refs[block_id] - 1
            num_refs[block_id] = left
            if left == 0:
                if hash_of(block_id) is None:
                    free.append(block_id)
                else:
                    cached[block_id] = None
            assert left >= 0, f"block {block_id} was freed twice"

    def _count_given_up(self, block_ids: Sequence[int], group_of: Sequence[int]) -> None:
        """Take the blocks that nobody will hold after these references are gone from their groups' held ones."""
        for block_id, num_left in Counter(block_ids).items():
            if self._num_refs[block_id] == num_left:
                self._num_held_of[group_of[block_id]] -= 1

    def drop_cached(self) -> None:
        """Turn every cached block into a free one; the caller clears the index."""
        self._free.extend(self._cached)
        self._cached.clear()

    def check_integrity(self, expected_refs: Sequence[int]) -> None:
        """Compare with the references that the callers know of.

        Raises:
            AssertionError: A block leaked, has too few references, or is in two places.
        """
        if list(expected_refs) != self._num_refs:
            wrong = {
                block_id: (actual, expected)
                for block_id, (actual, expected) in enumerate(zip(self._num_refs, expected_refs, strict=True))
                if actual != expected
            }
            raise AssertionError(f"block references (pool, owners) disagree: {wrong}")
        if self._group_of is not None:
            held = Counter(compress(self._group_of, self._num_refs))
            if [held[group] for group in range(len(self._num_held_of))] != self._num_held_of:
                raise AssertionError(f"the groups' held blocks are not {self._num_held_of}")
        # Requests wait for this check, and a cache may have 100,000 blocks: no Python loop over all of them.
        unheld = {*self._free, *self._cached}
        is_complete = self.num_free == len(unheld) == self._num_refs.count(0)
        if not is_complete or any(map(self._num_refs.__getitem__, unheld)):
            raise AssertionError("free and cached blocks are not the blocks that nobody holds")
        if any(map(self._index.hash_of, self._free)):
            raise AssertionError("a free block is still published")
        if not all(map(self._index.hash_of, self._cached)):
            raise AssertionError("a cached block is not published")

    def _assign(self, block_ids: Sequence[int], group: int) -> None:
        """Record the group that these newly taken blocks serve."""
        assert self._group_of is not None
        for block_id in block_ids:
            self._group_of[block_id] = group
        self._num_held_of[group] += len(block_ids)

    def _evict(self, num_blocks: int, requested: int) -> None:
        cached = self._cached
        if num_blocks > len(cached):
            raise OutOfBlocksError(requested=requested, free=self.num_free)
        evicted = [cached.popitem(last=False)[0] for _ in range(num_blocks)]
        self._on_evict(evicted)
        # Oldest last: allocate() takes from the end.
        self._free[:0] = evicted
        self.num_evicted += num_blocks
