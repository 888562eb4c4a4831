"""What a request must hold before it can begin: blocks that are in the cache, and fresh ones. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.contract.block_hash import BlockHash, group_hashes
from kv_transfer.cache_groups import ABSENT_BLOCK, BlockTables, CacheGroups, held_blocks
from kv_transfer.protocols import NO_ADDRESS


class CachedPrefix(NamedTuple):
    """The longest prefix of a request whose KV is in the cache, not yet held. ``tables`` end with ``num_blocks``.

    ``hashes`` are the addresses that were looked for. Where groups have windows, the cache may hold more than can be
    used by itself: ``behind`` are the blocks behind the prefix, a table a group, ABSENT_BLOCK for what is missing.
    """

    num_blocks: int
    tables: BlockTables
    hashes: Sequence[BlockHash] = ()
    behind: Sequence[Sequence[int]] = ()

    def addresses(self, num_groups: int) -> Sequence[Sequence[bytes]]:
        """The addresses of every group's blocks, NO_ADDRESS for those behind the prefix that are cached."""
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
    """``cached`` blocks to hold, by group, and ``num_fresh`` ones of each group to allocate: in gaps and behind them.

    A gap is an entry of ``cached`` that is absent, at one of the indices ``gaps`` of its group.
    """

    cached: BlockTables
    num_fresh: tuple[int, ...]
    gaps: Sequence[Sequence[int]] = ()

    @property
    def num_blocks(self) -> int:
        """Blocks to allocate."""
        return sum(self.num_fresh)

    def filled(self, fresh: BlockTables) -> BlockTables:
        """The block tables of a request that was given so many fresh blocks."""
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
        """The cached blocks, from the ``first_block``-th one of the request on."""
        if not self.gaps:
            return held_blocks([table[first_block:] for table in self.cached] if first_block else self.cached)
        return [block_id for table in self.cached for block_id in table[first_block:] if block_id != ABSENT_BLOCK]


class Start(NamedTuple):
    """What a waiting request would begin with: the blocks of ``need``, and a load or else ``num_tokens`` to compute."""

    need: BlockNeed
    num_tokens: int
    is_load: bool
    holds_blocks: bool = False


class BlockNeeds:
    """How many blocks requests take, by group.

    A group without a window holds all blocks of a request's known tokens from the start. One with a window holds what
    the next position sees and what the steps compute, and never more than ``most_blocks``: what lies further on is
    appended as computing proceeds, and what left the window is given back.
    """

    def __init__(self, groups: CacheGroups, *, chunk_tokens: int) -> None:
        self.groups = groups
        self.most_blocks = groups.most_blocks(chunk_tokens)

    def need(
        self, prefix: CachedPrefix, *, start: int, num_tokens: int, behind: Sequence[Sequence[int]] = ()
    ) -> BlockNeed:
        """What a request of ``num_tokens`` known tokens needs whose first position to compute is ``start``.

        ``start`` lies at or behind the end of the cached prefix; what is between them is loaded, but for the cached
        blocks ``behind`` the prefix.
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


def _extended(need: BlockNeed, behind: Sequence[Sequence[int]], num_local_blocks: int, end: int) -> BlockNeed:
    """A need that takes cached blocks behind the prefix, up to the ``end``-th one, instead of fresh ones."""
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
