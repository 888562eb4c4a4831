"""Blocks are counted, shared, evicted in order: B2, I2."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.block_hash import NO_KEYS_ROOT, BlockHash
from engine.contract.errors import OutOfBlocksError
from engine.scheduler.blocks.block_pool import BlockPool
from engine.scheduler.blocks.kv_cache_manager import KVCacheManager
from engine.scheduler.blocks.prefix_index import PrefixIndex


def content(number: int) -> BlockHash:
    """A made-up content address."""
    return BlockHash(number.to_bytes(16, "little"))


def manager(num_blocks: int) -> KVCacheManager:
    """A manager of blocks of 4 tokens."""
    return KVCacheManager(num_blocks=num_blocks, block_size=4)


def publish(kv_cache: KVCacheManager, block_ids: Sequence[int], numbers: Iterable[int]) -> None:
    """Publish blocks with made-up content."""
    kv_cache.publish([block_ids], [content(number) for number in numbers], NO_KEYS_ROOT, b"")


@pytest.mark.behaviour("B2")
def test_b2_a_failed_allocation_takes_nothing() -> None:
    kv_cache = manager(4)
    kv_cache.allocate(3)

    with pytest.raises(OutOfBlocksError, match="2 KV blocks requested, 1 free"):
        kv_cache.allocate(2)

    assert kv_cache.num_free == 1


@pytest.mark.behaviour("B2")
def test_b2_free_cached_blocks_stay_findable_and_blocks_without_content_go_first() -> None:
    kv_cache = manager(4)
    table = kv_cache.allocate(2)
    publish(kv_cache, [table[0]], [1])
    kv_cache.release(table)

    taken = kv_cache.allocate(3)

    assert table[0] not in taken
    assert kv_cache.prefix([content(1)]).tables[0] == [table[0]]


@pytest.mark.behaviour("B2")
def test_b2_the_least_recently_used_chain_goes_first_and_its_tail_before_its_head() -> None:
    kv_cache = manager(6)
    old, new = kv_cache.allocate(3), kv_cache.allocate(3)
    publish(kv_cache, old + new, range(6))
    kv_cache.release(new)
    kv_cache.release(old)
    kv_cache.hold(new[:1])
    kv_cache.release(new[:1])

    evicted = [kv_cache.allocate(1)[0] for _ in range(6)]

    assert evicted == [new[2], new[1], old[2], old[1], old[0], new[0]]


@pytest.mark.behaviour("B2")
def test_b2_one_allocation_evicts_in_the_same_order() -> None:
    kv_cache = manager(4)
    chain = kv_cache.allocate(4)
    publish(kv_cache, chain, range(4))
    kv_cache.release(chain)

    kv_cache.allocate(3)

    assert kv_cache.prefix([content(0), content(1)]).tables[0] == [chain[0]]


@pytest.mark.behaviour("B2")
def test_b2_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    kv_cache = manager(2)
    table = kv_cache.allocate(1)
    publish(kv_cache, [table[0]], [1])
    kv_cache.hold(table)

    kv_cache.release(table)
    assert kv_cache.num_free == 1
    kv_cache.release(table)
    assert kv_cache.num_free == 2


def test_freeing_twice_is_noticed() -> None:
    kv_cache = manager(2)
    table = kv_cache.allocate(1)
    kv_cache.release(table)

    with pytest.raises(AssertionError, match="freed twice"):
        kv_cache.release(table)


@pytest.mark.known_failure(9)
def test_known_failure_9_blocks_freed_while_a_step_is_in_flight_are_fenced_until_the_newest_one_returned() -> None:
    kv_cache = manager(4)
    table = kv_cache.allocate(2)
    kv_cache.step_scheduled(1)
    kv_cache.step_scheduled(2)
    kv_cache.release(table)
    assert (kv_cache.num_free, kv_cache.num_fenced) == (2, 2)

    kv_cache.step_returned(1)
    assert kv_cache.num_free == 2
    kv_cache.check_integrity([])
    kv_cache.step_returned(2)

    assert (kv_cache.num_free, kv_cache.num_fenced) == (4, 0)


def test_integrity_names_the_blocks_that_leaked() -> None:
    kv_cache = manager(4)
    table = kv_cache.allocate(1)
    kv_cache.check_integrity([table])

    with pytest.raises(AssertionError, match=rf"\{{{table[0]}: \(1, 0\)\}}"):
        kv_cache.check_integrity([])


def hold_a_free_one(pool: BlockPool, index: PrefixIndex) -> None:
    pool._free.append(pool.allocate(1)[0])


def lose_a_free_one(pool: BlockPool, index: PrefixIndex) -> None:
    pool._free.pop()


def keep_one_twice(pool: BlockPool, index: PrefixIndex) -> None:
    pool._free.append(pool._free[0])


def keep_one_in_two_places(pool: BlockPool, index: PrefixIndex) -> None:
    pool._free[0] = next(iter(pool._cached))


def publish_a_free_one(pool: BlockPool, index: PrefixIndex) -> None:
    index.publish(pool._free[0], content(9))


def withdraw_a_cached_one(pool: BlockPool, index: PrefixIndex) -> None:
    index.withdraw([next(iter(pool._cached))])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (hold_a_free_one, "disagree"),
        (lose_a_free_one, "not the blocks that nobody holds"),
        (keep_one_twice, "not the blocks that nobody holds"),
        (keep_one_in_two_places, "not the blocks that nobody holds"),
        (publish_a_free_one, "a free block is still published"),
        (withdraw_a_cached_one, "a cached block is not published"),
    ],
)
def test_integrity_notices_each_kind_of_damage(damage: Callable[[BlockPool, PrefixIndex], None], words: str) -> None:
    index = PrefixIndex(8)
    pool = BlockPool(8, index, on_evict=index.withdraw)
    block_id = pool.allocate(1)[0]
    index.publish(block_id, content(1))
    pool.free([block_id])
    pool.check_integrity([0] * 8)

    damage(pool, index)

    with pytest.raises(AssertionError, match=words):
        pool.check_integrity([0] * 8)


def test_integrity_counts_the_held_blocks_of_each_group() -> None:
    index = PrefixIndex(8)
    pool = BlockPool(8, index, on_evict=index.withdraw, num_groups=2)
    expected = [0] * 8
    for block_id in itertools.chain(*pool.allocate_by_group([2, 3])):
        expected[block_id] = 1
    pool.check_integrity(expected)

    pool._num_held_of[1] -= 1

    with pytest.raises(AssertionError, match="held blocks"):
        pool.check_integrity(expected)


KINDS = ["allocate", "share", "publish", "free", "drop"]
ACTIONS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 7)), max_size=80)


@pytest.mark.behaviour("B2", "I2")
@given(actions=ACTIONS)
@settings(derandomize=True, deadline=None, max_examples=300)
def test_b2_i2_whatever_happens_free_cached_and_held_add_up(actions: list[tuple[str, int]]) -> None:
    index = PrefixIndex(8)
    pool = BlockPool(8, index, on_evict=index.withdraw)
    tables: list[list[int]] = []
    used: set[int] = set()
    for number, (action, value) in enumerate(actions):
        if action == "allocate" and value <= pool.num_free:
            tables.append(pool.allocate(value))
            used.update(tables[-1])
        elif action == "share":
            found = index.block_of(content(value))
            if found is not None:
                pool.touch([found])
                tables.append([found])
        elif action == "publish" and tables and tables[value % len(tables)]:
            index.publish(tables[value % len(tables)][0], content(number % 8))
        elif action == "free" and tables:
            pool.free(tables.pop(value % len(tables)))
        elif action == "drop" and not tables:
            index.withdraw([block_id for block_id in range(8) if index.hash_of(block_id) is not None])
            pool.drop_cached()
        expected = [sum(table.count(block_id) for table in tables) for block_id in range(8)]
        pool.check_integrity(expected)
        assert pool.num_free + pool.num_held == 8
        assert pool.num_held == len({block_id for table in tables for block_id in table})
        assert used == set(range(pool.num_used)), "fresh blocks are taken in their order"
