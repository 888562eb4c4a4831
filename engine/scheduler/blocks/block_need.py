"""What a request must hold before it can begin: blocks that are in the cache, and fresh ones. Free of torch."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from kv_transfer.cache_groups import ABSENT_BLOCK, BlockTables, CacheGroups


class CachedPrefix(NamedTuple):
    """The longest prefix of a request whose KV is in the cache, not yet held. ``tables`` end with ``num_blocks``."""

    num_blocks: int
    tables: BlockTables


class BlockNeed(NamedTuple):
    """``cached`` blocks to hold, by group, and behind them ``num_fresh`` ones of each group to allocate."""

    cached: BlockTables
    num_fresh: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks to allocate."""
        return sum(self.num_fresh)


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

    def need(self, prefix: CachedPrefix, *, start: int, num_tokens: int) -> BlockNeed:
        """What a request of ``num_tokens`` known tokens needs whose first position to compute is ``start``.

        ``start`` lies at or behind the end of the cached prefix; what is between them is loaded.
        """
        end = self.groups.num_blocks_for(num_tokens)
        if self.groups.is_plain:
            return BlockNeed(prefix.tables, (end - prefix.num_blocks,))
        cached: BlockTables = []
        num_fresh: list[int] = []
        for group, (table, most) in enumerate(zip(prefix.tables, self.most_blocks, strict=True)):
            first = self.groups.first_block(group, start)
            num_left = min(first, prefix.num_blocks)
            cached.append([ABSENT_BLOCK] * first + table[num_left:])
            group_end = end if most is None else min(end, first + most)
            num_fresh.append(group_end - max(first, prefix.num_blocks))
        return BlockNeed(cached, tuple(num_fresh))

    def max_beam_tokens(self, *, num_prompt_tokens: int, width: int, num_blocks: int, max_tokens: int) -> int:
        """Tokens that the outputs of a beam search can have, prompt included, if it has so many blocks to itself.

        The full blocks of the prompt are shared by all beams, wherever no window leaves them behind.
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
