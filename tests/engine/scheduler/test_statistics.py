"""Statistics: C13."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from engine.contract.block_hash import NO_KEYS_ROOT, BlockHash
from engine.contract.stats import GAUGES, Counters
from engine.contract.step import ModelRunnerOutput
from engine.scheduler.blocks.kv_cache_manager import LIFETIME_SAMPLE, KVCacheManager
from tests.support.scheduler.scheduler_requests import fresh_prompt, make_config, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld


@pytest.mark.behaviour("C13")
def test_c13_gauges() -> None:
    world = SchedulerWorld(make_config(seqs=2), num_blocks=32)
    prompt = fresh_prompt(8)
    world.add(make_request("loading", prompt, output=(1,), kv_transfer=world.connector.offer(prompt)))
    for name in ("a", "b", "c"):
        world.add(make_request(name, 7))
    world.step()

    stats = world.scheduler.stats()

    assert (stats.num_running, stats.num_waiting, stats.num_loading) == (2, 1, 1)
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_held_blocks) == (32, 25, 7)
    assert stats.queued_prefill_tokens == 7
    assert stats.num_requests == 4


@pytest.mark.behaviour("C13")
def test_c13_a_snapshot_tells_what_it_declares_and_never_changes() -> None:
    world = SchedulerWorld(make_config(seqs=2), num_blocks=32)
    before = world.scheduler.stats()
    world.add(make_request("a", 7))

    assert vars(before).keys() == vars(Counters()).keys() | GAUGES.keys()
    assert before.values().keys() == vars(Counters()).keys()
    assert (before.num_requests, world.scheduler.stats().num_requests) == (0, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.num_requests = 2


@pytest.mark.behaviour("C13")
def test_c13_tokens_that_prefills_still_need_count_as_queued() -> None:
    world = SchedulerWorld(make_config(budget=8), num_blocks=32)
    world.add(make_request("a", 30))
    world.add(make_request("b", 5))
    assert world.scheduler.stats().queued_prefill_tokens == 35

    world.step()
    assert world.scheduler.stats().queued_prefill_tokens == 21 + 5
    world.abort("b")
    for _ in range(4):
        world.step()

    assert world.scheduler.stats().queued_prefill_tokens == 0


@pytest.mark.behaviour("C13")
def test_c13_requests_past_their_prompt_and_what_all_have_computed() -> None:
    world = SchedulerWorld(make_config(budget=8), num_blocks=32)
    world.add(make_request("a", 6))
    world.add(make_request("b", 9))
    assert (world.scheduler.stats().num_decoding, world.scheduler.stats().num_context_tokens) == (0, 0)

    world.step()
    assert (world.scheduler.stats().num_decoding, world.scheduler.stats().num_context_tokens) == (1, 6 + 2)
    world.step()

    assert (world.scheduler.stats().num_decoding, world.scheduler.stats().num_context_tokens) == (2, 7 + 9)


@pytest.mark.behaviour("C13")
def test_c13_cached_blocks_that_nobody_holds_are_free() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32)
    world.add(make_request("a", 30, max_tokens=2))
    world.run()

    assert world.scheduler.stats().num_free_blocks == 32


@pytest.mark.behaviour("C13")
def test_c13_counters() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32)
    prompt = fresh_prompt(9)
    for name in ("a", "b"):
        world.add(make_request(name, prompt, max_tokens=3))
        world.run()

    stats = world.scheduler.stats()

    assert (stats.num_finished, stats.num_generated_tokens) == (2, 6)
    assert stats.num_scheduled_tokens == (9 + 2) + (1 + 2)
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (18, 8)
    assert stats.num_allocated_blocks == 3 + 1


@pytest.mark.behaviour("C13")
def test_c13_local_and_remote_hits_are_apart() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32)
    prompt = fresh_prompt(16)
    world.add(make_request("local", prompt[:9], max_tokens=1))
    world.run()
    world.add(make_request("remote", prompt, output=(1,), kv_transfer=world.connector.offer(prompt), max_tokens=3))
    world.step()
    world.end_load("remote")
    world.run()

    stats = world.scheduler.stats()

    assert (stats.prefix_hit_tokens, stats.remote_hit_tokens) == (8, 8)


@pytest.mark.behaviour("C13")
def test_c13_request_whose_load_was_given_up_counts_once_and_had_waited_until_it_began() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32)
    prompt = fresh_prompt(12)
    world.now_s = 1.0
    world.add(make_request("a", prompt, output=(1,), kv_transfer=world.connector.offer(prompt), max_tokens=3))
    world.now_s = 3.0
    world.step()
    world.now_s = 30.0
    world.stall_load("a")
    output = world.scheduler.schedule()
    result = world.scheduler.update(output, world.runner.execute(output))

    stats = world.scheduler.stats()

    assert [delta.queue_s for delta in result.deltas_by_client()[""]] == [2.0]
    assert (stats.prefix_queried_tokens, stats.resumed_queried_tokens) == (13, 13)


@pytest.mark.behaviour("C13")
def test_c13_lifetimes_of_evicted_blocks_are_sampled() -> None:
    now_s = 10.0
    kv_cache = KVCacheManager(num_blocks=2 * LIFETIME_SAMPLE, block_size=4, clock=lambda: now_s)
    table = kv_cache.allocate(2 * LIFETIME_SAMPLE)
    kv_cache.publish([table], [BlockHash(block_id.to_bytes(16, "little")) for block_id in table], NO_KEYS_ROOT, b"")
    kv_cache.release(table)
    now_s = 13.0

    kv_cache.allocate(2 * LIFETIME_SAMPLE)

    assert (kv_cache.lifetimes.num_sampled, kv_cache.lifetimes.total_s) == (2, 6.0)


@pytest.mark.behaviour("C13")
def test_c13_a_snapshot_does_not_change() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32)
    stats = world.scheduler.stats()
    world.add(make_request("a", 4))

    assert stats.num_requests == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.num_requests = 1  # type: ignore[misc]


@pytest.mark.behaviour("F7")
def test_f7_tokens_whose_logits_held_a_nan_are_counted() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32)
    for name in ("a", "b", "c"):
        world.add(make_request(name, 7, max_tokens=3))
    output = world.scheduler.schedule()
    result = ModelRunnerOutput(
        sampled_token_ids=np.full(3, 5, dtype=np.int32), has_nan=np.array([True, False, True], dtype=np.bool_)
    )

    world.scheduler.update(output, result)

    assert world.scheduler.stats().num_nan_logits == 2


def test_first_delta_says_how_long_a_request_waited() -> None:
    world = SchedulerWorld(make_config(seqs=1), num_blocks=32)
    world.add(make_request("first", 7, max_tokens=2))
    world.add(make_request("second", 7, max_tokens=2))
    waited: dict[str, list[float]] = {}
    for _ in range(6):
        output = world.scheduler.schedule()
        result = ModelRunnerOutput(sampled_token_ids=np.full(output.rows.size, 5, dtype=np.int32))
        for deltas in world.scheduler.update(output, result).deltas_by_client().values():
            for delta in deltas:
                if delta.queue_s is not None:
                    waited.setdefault(delta.request_id, []).append(delta.queue_s)
        world.now_s += 1.0

    assert waited == {"first": [0.0], "second": [2.0]}
