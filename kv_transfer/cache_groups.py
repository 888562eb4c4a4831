"""KV cache groups: which blocks of each group a position needs, in arithmetic that engines and connectors share.

The layers of a model are divided into groups. All layers of a group see the same window of the tokens before them, and
every block holds the KV of one group's layers for ``block_size`` tokens. So a request has one block table a group, and
the blocks that every later position is past the window of are needed no more.
Source: the hybrid KV cache manager of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, TypeAlias

ABSENT_BLOCK: Final = -1
"""Stands in a block table where a group holds no block: it lies before the window."""

GroupBlocks: TypeAlias = tuple[tuple[int, ...], ...]
"""Blocks of a range of a request's tokens, one tuple a group, ABSENT_BLOCK where a group needs none."""


BlockTables: TypeAlias = list[list[int]]
"""A request's whole block tables, one a group, ABSENT_BLOCK before what the group's window needs."""


def block_place(index: int, group: int, num_groups: int) -> int:
    """One number for the ``index``-th block of a prompt in a group, ascending in the order of the prompt."""
    return index * num_groups + group


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The windows of the groups, in tokens that a position sees, itself included; None: all before it."""

    windows: tuple[int | None, ...]
    block_size: int

    @property
    def num_groups(self) -> int:
        """Block tables of one request."""
        return len(self.windows)

    @property
    def has_windows(self) -> bool:
        """True when some group forgets what lies before its window."""
        return any(window is not None for window in self.windows)

    @property
    def is_one_full_group(self) -> bool:
        """True for a single group without a window, which needs every block: what most models have."""
        return self.windows == (None,)

    def first_block(self, group: int, position: int) -> int:
        """Index of the first block that ``position`` sees in a group."""
        window = self.windows[group]
        return 0 if window is None else max(position - window + 1, 0) // self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks of one group that hold the KV of so many tokens, none of them left out."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, chunk_tokens: int) -> tuple[int | None, ...]:
        """Blocks of each group that a request holds at most at once, if steps compute so many of its tokens.

        None for groups without a window: they hold all.
        """
        return tuple(
            None if window is None else self.num_blocks_for(window + chunk_tokens) + 1 for window in self.windows
        )

    def num_blocks_at_once(self, num_tokens: int, *, chunk_tokens: int) -> int:
        """Blocks that a request of so many tokens holds at most at once, over all groups."""
        end = self.num_blocks_for(num_tokens)
        return sum(end if most is None else min(end, most) for most in self.most_blocks(chunk_tokens))

    def max_tokens(self, num_blocks: int, *, chunk_tokens: int) -> int | None:
        """Tokens of the longest request that so many blocks can hold; None: of any length."""
        limits = [most for most in self.most_blocks(chunk_tokens) if most is not None]
        if len(limits) == self.num_groups and sum(limits) <= num_blocks:
            return None
        end = num_blocks
        while self.num_blocks_at_once(end * self.block_size, chunk_tokens=chunk_tokens) > num_blocks:
            end -= 1
        return end * self.block_size

    def longest_prefix(self, num_blocks: int, first_block: int, has: Callable[[int, int], bool]) -> int:
        """How many leading blocks of a chain can be used, of ``num_blocks``.

        A length can be used when every group has the blocks from ``first_block`` on that the position behind it sees.
        ``has(group, index)`` says whether the ``index``-th block of a group is there.
        """
        length = num_blocks
        for group, window in enumerate(self.windows):
            if window is None:
                length = next((index for index in range(first_block, length) if not has(group, index)), length)
        windowed = [group for group, window in enumerate(self.windows) if window is not None]
        is_settled = False
        while not is_settled and length > first_block:
            is_settled = True
            for group in windowed:
                # A shorter length whose window holds the missing block fails as well: go on right before that block.
                start = max(self.first_block(group, length * self.block_size), first_block)
                missing = next((index for index in range(length - 1, start - 1, -1) if not has(group, index)), None)
                if missing is not None:
                    length, is_settled = missing, False
        return max(length, first_block)


def first_held_block(table: Sequence[int]) -> int:
    """How many entries of a block table are absent: they come first."""
    if not table or table[0] != ABSENT_BLOCK:
        return 0
    return next((index for index, block_id in enumerate(table) if block_id != ABSENT_BLOCK), len(table))


def has_window(groups: CacheGroups, tables: Sequence[Sequence[int]], position: int) -> bool:
    """True when block tables hold, of every group, the blocks before ``position`` that it sees."""
    return all(first_held_block(table) <= groups.first_block(group, position) for group, table in enumerate(tables))


def held_blocks(tables: Sequence[Sequence[int]]) -> list[int]:
    """The blocks of one request's tables in the order of its tokens. Absent ones come first in every table."""
    if len(tables) == 1 and (not tables[0] or tables[0][0] != ABSENT_BLOCK):
        return list(tables[0])
    return [
        block_id
        for column in zip_longest(*tables, fillvalue=ABSENT_BLOCK)
        for block_id in column
        if block_id != ABSENT_BLOCK
    ]
