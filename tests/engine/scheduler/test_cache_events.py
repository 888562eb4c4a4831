"""What a router needs to mirror the prefix cache: B4."""

from __future__ import annotations

import pytest

from engine.contract.block_hash import BlockHash, root_hash
from engine.contract.token_ids import TokenIds
from engine.scheduler.blocks.cache_events import AllCleared, BlockStored, CacheEventBatch, CacheEventLog
from tests.support.scheduler.cache_mirror import mirrored
from tests.support.scheduler.scheduler_requests import fresh_prompt, make_config, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld


@pytest.mark.behaviour("B4")
def test_b4_a_mirror_follows_the_index_through_decoding_eviction_loads_and_resets() -> None:
    world = SchedulerWorld(make_config(enable_cache_events=True), num_blocks=12)
    mirror: set[BlockHash] = set()
    next_sequence = 0
    for index in range(12):
        prompt = fresh_prompt(4 + index)
        offer = world.connector.offer(prompt) if index % 3 == 0 else None
        world.add(make_request(f"r{index}", prompt, max_tokens=7, kv_transfer=offer))
        world.step()
        for request_id in list(world.connector.open_loads):
            world.end_load(request_id, [0] if index % 2 else [])
        world.run()
        if index == 6:
            world.scheduler.reset_prefix_cache()
        batch = world.scheduler.cache_events_since(next_sequence)
        assert batch.first_sequence == next_sequence
        mirrored(batch, mirror)
        next_sequence = batch.next_sequence

        assert mirror == set(world.scheduler._kv_cache._index._block_of)

    assert mirrored(world.scheduler.cache_events_since(0)) == mirror, "a late joiner replays"
    assert world.scheduler.stats().num_evicted_blocks > 0


@pytest.mark.behaviour("B4")
def test_b4_stored_blocks_name_their_parent_and_tokens() -> None:
    world = SchedulerWorld(make_config(enable_cache_events=True), num_blocks=12)
    prompt = fresh_prompt(9)
    world.add(make_request("a", prompt, max_tokens=1))
    world.run()

    first, second = world.scheduler.cache_events_since(0).events

    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.parent_hash, first.token_bytes) == (root_hash(), TokenIds.of(prompt[:4]).data)
    assert (second.parent_hash, second.token_bytes) == (first.block_hash, TokenIds.of(prompt[4:8]).data)


@pytest.mark.behaviour("B4")
def test_b4_the_buffer_is_bounded_and_a_reader_sees_what_it_missed() -> None:
    log = CacheEventLog(3)
    for _ in range(5):
        log.append(AllCleared())

    batch = log.since(1)

    assert (batch.first_sequence, len(batch.events), batch.next_sequence) == (2, 3, 5)
    assert log.since(5) == CacheEventBatch(first_sequence=5, events=())
    assert log.since(99).first_sequence == 5


@pytest.mark.behaviour("B4")
def test_b4_switched_off_nothing_is_recorded() -> None:
    world = SchedulerWorld(make_config(), num_blocks=12)
    world.add(make_request("a", 9, max_tokens=1))
    world.run()

    assert world.scheduler.cache_events_since(0) == CacheEventBatch(first_sequence=0, events=())
