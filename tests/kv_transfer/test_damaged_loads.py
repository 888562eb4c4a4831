"""A load that is good in part: exactly the blocks that cannot be trusted are called invalid (K4)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import InvalidOptionError
from kv_transfer.fault_options import Fault, FaultOptions, ScheduledFault
from kv_transfer.layout import KVRegion, MemoryKind
from kv_transfer.memory.block_memory import HostBlockMemory
from tests.support.engine.kv_engine import KVEngine
from tests.support.kv.kv_world import KVWorld

BIG_HEAD_DIM = (4 << 20) // 64
"""With it a block has 4 MiB, and a part of a load has two blocks."""


@pytest.fixture
def world() -> Iterator[KVWorld]:
    world = KVWorld("inproc")
    yield world
    world.close()


@pytest.fixture
def source(world: KVWorld) -> KVEngine:
    engine = world.make_reader(world.spec("source"))
    engine.fill(tuple(range(8)), world.seed())
    return engine


def _faults(fault: Fault, *occasions: int) -> FaultOptions:
    return FaultOptions(schedule=tuple(ScheduledFault(fault=fault, nth=nth) for nth in occasions))


def test_flipped_bit_makes_exactly_its_block_invalid(world: KVWorld, source: KVEngine) -> None:
    reader = world.make_reader(world.spec("reader", faults=_faults(Fault.BIT_FLIPS, 1)))

    ended = reader.load("a", source.grant("a", (1, 2, 3, 4)), (11, 12, 13, 14))

    (bad,) = ended.failed_block_ids
    assert "checksums" in str(ended.error)
    for source_block_id, block_id in ((1, 11), (2, 12), (3, 13), (4, 14)):
        assert (reader.content((block_id,)) == source.content((source_block_id,))) is (block_id != bad)
    assert reader.stats().num_corrupt_blocks == 1
    assert (reader.stats().num_failed_blocks, reader.stats().num_blocks) == (1, 4)


def test_large_parts_are_compared_beside_the_reads_that_follow(world: KVWorld) -> None:
    """Parts of 8 MiB: each is compared in a thread of its own, and the load ends when all of them were."""
    source = world.make_reader(world.spec("source", num_blocks=8, head_dim=BIG_HEAD_DIM))
    source.memory[:6] = 7
    before = set(threading.enumerate())
    reader = world.make_reader(
        world.spec("reader", num_blocks=8, head_dim=BIG_HEAD_DIM, faults=_faults(Fault.BIT_FLIPS, 1, 3))
    )

    ended = reader.load("a", source.grant("a", (0, 1, 2, 3, 4, 5)), (2, 3, 4, 5, 6, 7))

    assert len(ended.failed_block_ids) == reader.stats().num_corrupt_blocks == 2
    assert {block_id in (2, 3) for block_id in ended.failed_block_ids} == {True, False}, "one of each damaged part"
    for block_id in range(2, 8):
        assert (reader.memory[block_id] == 7).all() == (block_id not in ended.failed_block_ids)
    reader.close()
    assert not set(threading.enumerate()) - before


def test_blocks_that_changed_since_they_were_handed_over_are_invalid(world: KVWorld, source: KVEngine) -> None:
    reader = world.make_reader(world.spec("reader"))
    params = source.grant("a", (1, 2, 3))
    source.fill((2,), world.seed())

    assert reader.load("a", params, (5, 6, 7)).failed_block_ids == (6,)


def test_partial_pull_compares_the_blocks_that_it_reads(world: KVWorld, source: KVEngine) -> None:
    reader = world.make_reader(world.spec("reader"))
    params = source.grant("a", (1, 2, 3, 4))
    source.fill((1, 4), world.seed())

    assert reader.load("a", params, (5, 6, 7), first_block=1).failed_block_ids == (7,)


@pytest.mark.parametrize("source_checksums, reader_checksums", [(False, True), (True, False)])
def test_without_checksums_on_both_sides_nothing_is_compared(
    world: KVWorld, source_checksums: bool, reader_checksums: bool
) -> None:
    source = world.make_reader(world.spec("source", checksums=source_checksums))
    reader = world.make_reader(world.spec("reader", checksums=reader_checksums))
    params = source.grant("a", (1,))
    source.fill((1,), world.seed())

    assert reader.load("a", params, (5,)).error is None
    assert (params.checksums is None) is not source_checksums


def test_wrong_number_of_checksums_is_not_used(world: KVWorld, source: KVEngine) -> None:
    reader = world.make_reader(world.spec("reader"))
    params = source.grant("a", (1, 2))

    assert reader.match(replace(params, checksums=((1,),)), 8, 0).num_tokens == 0


def test_checksums_of_memory_that_cannot_be_looked_at_are_refused() -> None:
    region = KVRegion(base_address=0, num_blocks=1, block_bytes=8, memory=MemoryKind.VRAM, device_index=0)

    with pytest.raises(InvalidOptionError, match="VRAM"):
        HostBlockMemory(region)


@given(data=st.binary(min_size=24, max_size=24), bit=st.integers(0, 63), block_id=st.integers(0, 2))
def test_any_flipped_bit_changes_the_checksum_of_its_block_alone(data: bytes, bit: int, block_id: int) -> None:
    array = np.frombuffer(bytearray(data), dtype=np.uint8)
    memory = HostBlockMemory(
        KVRegion(base_address=array.ctypes.data, num_blocks=3, block_bytes=8, memory=MemoryKind.DRAM, device_index=0)
    )
    before = memory.checksums((0, 1, 2))

    memory.flip_bit(block_id, bit)

    after = memory.checksums((0, 1, 2))
    assert [index for index in range(3) if before[index] != after[index]] == [block_id]


@pytest.mark.parametrize("block_id", [-1, 3])
def test_bytes_beside_the_region_are_not_looked_at(block_id: int) -> None:
    """Hashing them would read other memory, or crash the process."""
    array = np.zeros(24, dtype=np.uint8)
    memory = HostBlockMemory(
        KVRegion(base_address=array.ctypes.data, num_blocks=3, block_bytes=8, memory=MemoryKind.DRAM, device_index=0)
    )

    with pytest.raises(IndexError, match=f"block {block_id} is not among the 3"):
        memory.checksums((0, block_id))
    with pytest.raises(IndexError, match=f"block {block_id} is not among the 3"):
        memory.flip_bit(block_id, 0)


def _big_pair(world: KVWorld, faults: FaultOptions) -> tuple[KVEngine, KVEngine]:
    source = world.make_reader(world.spec("source", head_dim=BIG_HEAD_DIM, num_blocks=5))
    reader = world.make_reader(world.spec("reader", head_dim=BIG_HEAD_DIM, num_blocks=5, faults=faults))
    source.memory[:] = np.arange(5, dtype=np.uint8)[:, None]
    return source, reader


def test_part_that_fails_twice_costs_no_more_than_itself(world: KVWorld) -> None:
    source, reader = _big_pair(world, _faults(Fault.READ_FAILS, 2, 4))

    ended = reader.load("a", source.grant("a", (0, 1, 2, 3, 4)), (0, 1, 2, 3, 4))

    assert ended.failed_block_ids in ((2, 3), (4,))
    assert "a read failed" in str(ended.error)
    for block_id in set(range(5)) - set(ended.failed_block_ids):
        assert reader.content((block_id,)) == source.content((block_id,))


def test_parts_that_are_here_are_not_read_again(world: KVWorld) -> None:
    source, reader = _big_pair(world, _faults(Fault.READ_FAILS, 3))

    ended = reader.load("a", source.grant("a", (0, 1, 2, 3, 4)), (0, 1, 2, 3, 4))

    assert ended.error is None
    assert reader.content((0, 1, 2, 3, 4)) == source.content((0, 1, 2, 3, 4))
    assert ended.num_bytes == reader.stats().num_bytes == 5 * reader.spec.layout.block_bytes


@pytest.mark.known_failure(1)
def test_parts_read_under_a_lease_that_ended_are_worth_nothing(world: KVWorld) -> None:
    source, reader = _big_pair(world, _faults(Fault.READ_FAILS, 2, 3, 4))
    params = source.grant("a", (0, 1, 2, 3, 4))
    source.abort_lease("a")

    assert reader.load("a", params, (0, 1, 2, 3, 4)).failed_block_ids == (0, 1, 2, 3, 4)
