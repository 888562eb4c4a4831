"""How a hand-over is cut into reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.peer.part_reads import Part, ReaderLimits, split_blocks

BLOCK_BYTES = 10
LIMITS = ReaderLimits(load_timeout_s=0.0, renewal_period_s=0.0, part_bytes=20, max_part_bytes=40)


def _split(num_blocks: int, limits: ReaderLimits = LIMITS, block_bytes: int = BLOCK_BYTES) -> list[Part]:
    sources = range(1000, 1000 + num_blocks)
    return list(split_blocks(sources, range(num_blocks), None, block_bytes=block_bytes, limits=limits, first_number=7))


@pytest.mark.parametrize(
    ("num_blocks", "sizes"),
    [(0, []), (1, [1]), (5, [2, 2, 1]), (14, [3, 2, 2, 2, 2, 2, 1]), (20, [4, 4, 3, 2, 2, 2, 2, 1])],
)
def test_parts_become_smaller_towards_the_end(num_blocks: int, sizes: list[int]) -> None:
    assert [len(part.block_ids) for part in _split(num_blocks)] == sizes


@given(st.integers(0, 300), st.integers(1, 60))
def test_every_block_is_in_one_part_beside_its_source(num_blocks: int, block_bytes: int) -> None:
    parts = _split(num_blocks, block_bytes=block_bytes)

    assert [block_id for part in parts for block_id in part.block_ids] == list(range(num_blocks))
    assert [block_id - 1000 for part in parts for block_id in part.source_block_ids] == list(range(num_blocks))
    assert [part.number for part in parts] == list(range(7, 7 + len(parts)))
    for part in parts:
        assert part.num_bytes == len(part.block_ids) * block_bytes
        assert part.num_bytes <= max(LIMITS.max_part_bytes, block_bytes)
