"""KV cache groups: which blocks of each group a position needs. Engines and connectors share this arithmetic.

The layers of a model are divided into groups. All layers of a group see the same window of the tokens before them, and
every block holds the KV of one group's layers for ``block_size`` tokens. So a request has one block table for each
group. A block is no longer needed once it lies before the window of every later position.
Source: the hybrid KV cache manager of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, TypeAlias

ABSENT_BLOCK: Final = -1
"""Block table entry for a block that the group does not hold, because it lies before the window."""

GroupBlocks: TypeAlias = tuple[tuple[int, ...], ...]
"""Blocks for a range of a request's tokens: one tuple per group, with ABSENT_BLOCK where the group needs no block."""


BlockTables: TypeAlias = list[list[int]]
"""A request's whole block tables, one per group, with ABSENT_BLOCK for blocks before the group's window."""


def block_place(index: int, group: int, num_groups: int) -> int:
    """One number for the ``index``-th block of a prompt in a group, ascending in the order of the prompt."""
    return index * num_groups + group


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The window of each group: how many tokens a position sees, itself included. None: it sees all earlier tokens."""

    windows: tuple[int | None, ...]
    block_size: int

    @property
    def num_groups(self) -> int:
        """Block tables of one request."""
        return len(self.windows)

    @property
    def has_windows(self) -> bool:
        """True when at least one group has a window, so that earlier blocks can be dropped."""
        return any(window is not None for window in self.windows)

    @property
    def is_one_full_group(self) -> bool:
        """True for a single group without a window, which needs every block. Most models are like this."""
        return self.windows == (None,)

    def first_block(self, group: int, position: int) -> int:
        """Index of the first block that ``position`` sees in a group."""
        window = self.windows[group]
        return 0 if window is None else max(position - window + 1, 0) // self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that one group needs for the KV of ``num_tokens`` tokens, ignoring its window."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, chunk_tokens: int) -> tuple[int | None, ...]:
        """The most blocks of each group that a request holds at one time, if a step computes ``chunk_tokens`` tokens.

        None for groups without a window: they hold all blocks.
        """
        return tuple(
            None if window is None else self.num_blocks_for(window + chunk_tokens) + 1 for window in self.windows
        )

    def num_blocks_at_once(self, num_tokens: int, *, chunk_tokens: int) -> int:
        """The most blocks, over all groups, that a request of ``num_tokens`` tokens holds at one time."""
        end = self.num_blocks_for(num_tokens)
        return sum(end if most is None else min(end, most) for most in self.most_blocks(chunk_tokens))

    def max_tokens(self, num_blocks: int, *, chunk_tokens: int) -> int | None:
        """Length in tokens of the longest request that fits into ``num_blocks``; None when any length fits."""
        limits = [most for most in self.most_blocks(chunk_tokens) if most is not None]
        if len(limits) == self.num_groups and sum(limits) <= num_blocks:
            return None
        end = num_blocks
        while self.num_blocks_at_once(end * self.block_size, chunk_tokens=chunk_tokens) > num_blocks:
            end -= 1
        return end * self.block_size

    def longest_prefix(self, num_blocks: int, first_block: int, has: Callable[[int, int], bool]) -> int:
        """How many leading blocks of a chain of ``num_blocks`` can be used as a prefix.

        A prefix can be used when every group has those blocks, from ``first_block`` on, that the next position sees.
        ``has(group, index)`` says whether the ``index``-th block of a group is available.
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
                # A shorter prefix whose window includes the missing block fails too: try the one that ends before it.
                start = max(self.first_block(group, length * self.block_size), first_block)
                missing = next((index for index in range(length - 1, start - 1, -1) if not has(group, index)), None)
                if missing is not None:
                    length, is_settled = missing, False
        return max(length, first_block)


def first_held_block(table: Sequence[int]) -> int:
    """How many entries at the start of a block table are absent. Absent entries always come first."""
    if not table or table[0] != ABSENT_BLOCK:
        return 0
    return next((index for index, block_id in enumerate(table) if block_id != ABSENT_BLOCK), len(table))


def has_window(groups: CacheGroups, tables: Sequence[Sequence[int]], position: int) -> bool:
    """True when the block tables of all groups hold every earlier block that ``position`` sees."""
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
