"""What a request must hold before it can begin: cached blocks, and fresh ones. Free of torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from engine.contract.block_hash import BlockHash, group_hashes
from kv_transfer.cache_groups import ABSENT_BLOCK, BlockTables, CacheGroups, held_blocks
from kv_transfer.protocols import NO_ADDRESS


class CachedPrefix(NamedTuple):
    """The longest prefix of a request whose KV is in the cache; its blocks are not held yet.

    ``tables`` end with block ``num_blocks``. ``hashes`` are the addresses that were looked up. Where groups have
    windows, the cache may hold more than it can use by itself: ``behind`` are the cached blocks behind the prefix, one
    table per group, with ABSENT_BLOCK for missing ones.
    """

    num_blocks: int
    tables: BlockTables
    hashes: Sequence[BlockHash] = ()
    behind: Sequence[Sequence[int]] = ()

    def addresses(self, num_groups: int) -> Sequence[Sequence[bytes]]:
        """The addresses of every group's blocks; NO_ADDRESS for cached blocks after the prefix."""
        addresses = group_hashes(self.hashes, num_groups)
        if not self.behind:
            return addresses
        known: list[list[bytes]] = [list(of_group) for of_group in addresses]
        for of_group, behind in zip(known, self.behind, strict=True):
            for index, block_id in enumerate(behind, self.num_blocks):
                if block_id != ABSENT_BLOCK:
                    of_group[index] = NO_ADDRESS
        return known


class BlockNeed(NamedTuple):
    """Blocks that a request needs: ``cached`` ones to hold, by group, and in each group ``num_fresh`` ones to allocate.

    Fresh blocks go into the gaps of the cached ones, and after them. A gap is an absent entry of ``cached``; ``gaps``
    has the indices of the gaps of each group.
    """

    cached: BlockTables
    num_fresh: tuple[int, ...]
    gaps: Sequence[Sequence[int]] = ()

    @property
    def num_blocks(self) -> int:
        """Blocks to allocate."""
        return sum(self.num_fresh)

    @property
    def most_blocks(self) -> int:
        """The most free blocks that it can take: as many as if nobody held any of its cached ones."""
        return self.num_blocks + sum(map(len, self.cached))

    def filled(self, fresh: BlockTables) -> BlockTables:
        """The request's block tables, with ``fresh`` blocks in the gaps and after the cached ones."""
        if not self.gaps:
            return [table + more for table, more in zip(self.cached, fresh, strict=True)]
        tables: BlockTables = []
        for table, gaps, more in zip(self.cached, self.gaps, fresh, strict=True):
            filled = table + more[len(gaps) :]
            for index, block_id in zip(gaps, more, strict=False):
                filled[index] = block_id
            tables.append(filled)
        return tables

    def held(self, first_block: int = 0) -> list[int]:
        """The cached blocks with index ``first_block`` or above."""
        if not self.gaps:
            return held_blocks([table[first_block:] for table in self.cached] if first_block else self.cached)
        return [block_id for table in self.cached for block_id in table[first_block:] if block_id != ABSENT_BLOCK]


class Start(NamedTuple):
    """How a waiting request would begin: with the blocks of ``need``, and a load or else ``num_tokens`` to compute."""

    need: BlockNeed
    num_tokens: int
    is_load: bool
    holds_blocks: bool = False


class BlockNeeds:
    """How many blocks requests take, by group.

    In a group without a window, a request holds the blocks of all its known tokens from the start. In a group with one,
    it holds what the next position sees and what the next steps compute, at most ``most_blocks``. Later blocks are
    appended while it computes, and blocks that leave the window are given back.
    """

    def __init__(self, groups: CacheGroups, *, chunk_tokens: int) -> None:
        self.groups = groups
        self.most_blocks = groups.most_blocks(chunk_tokens)

    def need(
        self, prefix: CachedPrefix, *, start: int, num_tokens: int, behind: Sequence[Sequence[int]] = ()
    ) -> BlockNeed:
        """What a request of ``num_tokens`` known tokens needs to begin computing at position ``start``.

        ``start`` lies at or after the end of the cached prefix. Blocks in between are loaded, except those that are
        cached ``behind`` the prefix.
        """
        end = self.groups.num_blocks_for(num_tokens)
        if self.groups.is_one_full_group:
            return BlockNeed(prefix.tables, (end - prefix.num_blocks,))
        cached: BlockTables = []
        num_fresh: list[int] = []
        for group, (table, most) in enumerate(zip(prefix.tables, self.most_blocks, strict=True)):
            first = self.groups.first_block(group, start)
            num_left = min(first, prefix.num_blocks)
            cached.append([ABSENT_BLOCK] * first + table[num_left:])
            group_end = end if most is None else min(end, first + most)
            num_fresh.append(group_end - max(first, prefix.num_blocks))
        need = BlockNeed(cached, tuple(num_fresh))
        return _extended(need, behind, prefix.num_blocks, start // self.groups.block_size) if behind else need

    def max_beam_tokens(self, *, num_prompt_tokens: int, width: int, num_blocks: int, max_tokens: int) -> int:
        """The most tokens, prompt included, that the outputs of a beam search can have when it has ``num_blocks`` to
        itself.

        All beams share the full blocks of the prompt, as long as no window leaves them behind.
        """
        num_shared = num_prompt_tokens // self.groups.block_size

        def num_needed(num_columns: int) -> int:
            own = max(num_columns - num_shared, 0)
            return sum(
                min(num_columns, num_shared) + width * own if most is None else width * min(num_columns, most)
                for most in self.most_blocks
            )

        columns = range(self.groups.num_blocks_for(max_tokens) + 1)
        num_columns = bisect_right(columns, num_blocks, key=num_needed) - 1
        return min(num_columns * self.groups.block_size, max_tokens)


def _extended(need: BlockNeed, behind: Sequence[Sequence[int]], num_local_blocks: int, end: int) -> BlockNeed:
    """A need that uses cached blocks after the prefix, up to block ``end`` (exclusive), in place of fresh ones."""
    cached: BlockTables = []
    gaps: BlockTables = []
    num_fresh: list[int] = []
    for table, of_group, num in zip(need.cached, behind, need.num_fresh, strict=True):
        more = list(of_group[len(table) - num_local_blocks : end - num_local_blocks])
        while more and more[-1] == ABSENT_BLOCK:
            more.pop()
        gaps.append([index for index, block_id in enumerate(more, len(table)) if block_id == ABSENT_BLOCK])
        cached.append(table + more)
        num_fresh.append(num - len(more) + len(gaps[-1]))
    return BlockNeed(cached, tuple(num_fresh), gaps)
