"""The changes that routers receive add up to the prefix cache's index, wherever they are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.contract.block_hash import (
    KEY_BYTES,
    BlockHash,
    block_key,
    hash_chain,
    prompt_keys,
    prompt_root,
    unpack_keys,
)
from engine.contract.messages import CacheChanges
from engine.contract.token_ids import TokenIds
from engine.scheduler.blocks.cache_events import (
    AllCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    CacheEventLog,
    cache_changes,
)
from tests.support.scheduler.scheduler_requests import fresh_prompt, make_config, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld


def joined_keys(keys: bytes) -> set[bytes]:
    return {keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)}


def applied(finished: CacheChanges, known: set[bytes]) -> set[bytes]:
    before = set() if finished.is_snapshot else known
    return before - joined_keys(finished.removed) | joined_keys(finished.stored)


EVENTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=40)


@given(changes=EVENTS, cuts=st.sets(st.integers(0, 40)))
def test_news_come_to_the_same_however_the_events_are_cut(changes: list[tuple[int, int]], cuts: set[int]) -> None:
    log = CacheEventLog(100)
    index: set[bytes] = set()
    known: set[bytes] = set()
    next_sequence = 0
    for place, (number, kind) in enumerate(changes):
        block_hash = BlockHash(bytes([number]) * 16)
        event: CacheEvent
        if kind == 0:
            event = AllCleared()
            index.clear()
        elif block_key(block_hash) in index:
            event = BlockRemoved(block_hash)
            index.discard(block_key(block_hash))
        else:
            event = BlockStored(block_hash, parent_hash=block_hash, token_bytes=b"")
            index.add(block_key(block_hash))
        log.append(event)
        if place in cuts:
            finished = cache_changes(log.since(next_sequence))
            assert finished.first_sequence == next_sequence
            next_sequence = finished.next_sequence
            known = applied(finished, known)
            assert known == index
    assert applied(cache_changes(log.since(next_sequence)), known) == index


def test_snapshot_is_the_index_and_a_reader_that_fell_behind_gets_one() -> None:
    world = SchedulerWorld(make_config(enable_cache_events=True, cache_event_capacity=4), num_blocks=12)
    for number in range(6):
        world.add(make_request(f"r{number}", fresh_prompt(9 + number), max_tokens=3))
        world.run()
    index = {block_key(item) for item in world.scheduler._kv_cache.published()}

    behind = world.scheduler.cache_changes_since(1)
    assert behind is not None
    assert behind.is_snapshot
    assert joined_keys(behind.stored) == index
    assert world.scheduler.cache_changes_since(behind.next_sequence) is None


def test_router_knows_a_prompts_blocks_by_the_engines_hashes() -> None:
    world = SchedulerWorld(make_config(enable_cache_events=True), num_blocks=12)
    prompt = fresh_prompt(9)
    world.add(make_request("a", prompt, max_tokens=1, salt="mine"))
    world.run()

    stored = unpack_keys(world.scheduler.cache_snapshot().stored)

    assert prompt_keys(prompt, "mine", world.block_size) == stored
    assert not set(prompt_keys(prompt, None, world.block_size)).intersection(stored)
    chain = hash_chain(prompt_root("mine"), TokenIds.of(prompt).array, world.block_size)
    assert [block_key(item) for item in chain] == [key.to_bytes(KEY_BYTES, "little") for key in stored]
