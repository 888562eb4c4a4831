"""The prefix cache: B1, B3, B5, B6, and prompts that are being computed right now."""

from __future__ import annotations

import pytest

from engine.contract.block_hash import hash_block, hash_chain, root_hash
from engine.contract.messages import CacheReset
from engine.contract.token_ids import TokenIds
from tests.support.scheduler.scheduler_requests import fresh_prompt, make_config, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld


def finished(world: SchedulerWorld, prompt: tuple[int, ...], **options: object) -> None:
    """Leave a prompt in the cache."""
    world.add(make_request(f"finished {len(world.requests)}", prompt, max_tokens=1, **options))  # type: ignore[arg-type]
    world.run()


def first_positions(world: SchedulerWorld, *prompts: tuple[int, ...], **options: object) -> list[int]:
    """The first computed position of each of these prompts."""
    for prompt in prompts:
        world.add(make_request(f"r{len(world.requests)}", prompt, max_tokens=1, **options))  # type: ignore[arg-type]
    output = world.step()
    world.run()
    for name in world.requests:
        world.check_output(name)
    return output.first_positions.tolist()


@pytest.mark.behaviour("B1")
def test_b1_a_hash_covers_parent_tokens_and_extra_keys() -> None:
    tokens = TokenIds.of(tuple(range(8))).array
    chain = hash_chain(root_hash(), tokens, 4)

    assert chain == hash_chain(root_hash(), tokens, 4)
    assert chain[1] == hash_block(chain[0], tokens[4:].tobytes())
    assert chain[0] != hash_chain(root_hash(), tokens[4:], 4)[0], "tokens"
    assert chain[1] != hash_chain(root_hash(), tokens[4:], 4)[0], "parent"
    roots = {root_hash(keys) for keys in [(), ("a",), ("b",), ("a", "b"), ("ab",), ("a", ""), ("", "a")]}
    assert len(roots) == 7, "extra keys"


@pytest.mark.behaviour("B1")
@pytest.mark.parametrize(("num_tokens", "num_hit"), [(3, 0), (4, 0), (5, 4), (11, 8), (12, 8), (13, 12)])
def test_b1_the_longest_prefix_is_found_and_the_last_token_is_always_computed(num_tokens: int, num_hit: int) -> None:
    world = SchedulerWorld(make_config(), num_blocks=32)
    prompt = fresh_prompt(num_tokens)
    finished(world, prompt)

    assert first_positions(world, prompt) == [num_hit]


@pytest.mark.behaviour("B1")
def test_b1_output_tokens_are_cached_like_prompt_tokens() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32)
    prompt = fresh_prompt(6)
    world.add(make_request("a", prompt, max_tokens=8))
    world.run()

    follow_up = (*prompt, *world.endings["a"].token_ids, 1, 2)

    assert first_positions(world, follow_up) == [12]


@pytest.mark.behaviour("B1")
def test_b1_a_cache_salt_keeps_prefixes_of_different_users_apart() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32)
    prompt = fresh_prompt(10)
    finished(world, prompt, salt="alice")

    assert first_positions(world, prompt) == [0]
    assert first_positions(world, prompt, salt="bob") == [0]
    assert first_positions(world, prompt, salt="alice") == [8]


@pytest.mark.behaviour("B1")
def test_b1_switched_off_nothing_is_looked_up() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32, enable_prefix_caching=False)
    prompt = fresh_prompt(10)
    finished(world, prompt)

    assert first_positions(world, prompt) == [0]


@pytest.mark.behaviour("B3")
def test_b3_a_block_is_published_when_its_step_has_returned() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32)
    prompt = fresh_prompt(9)
    world.add(make_request("a", prompt, max_tokens=2))
    world.schedule()
    hashes = hash_chain(root_hash(), TokenIds.of(prompt).array, 4)
    assert world.scheduler._kv_cache.find_column(hashes[0]) == [None]

    world.complete_step()

    assert all(world.scheduler._kv_cache.find_column(block_hash) != [None] for block_hash in hashes)


def test_a_burst_of_prompts_with_a_common_prefix_computes_it_once() -> None:
    world = SchedulerWorld(make_config(seqs=8, budget=16), num_blocks=64)
    prefix = fresh_prompt(24)
    for index in range(6):
        world.add(make_request(f"r{index}", (*prefix, *fresh_prompt(3)), max_tokens=1))
    world.run()

    assert world.runner.num_computed_positions == 24 + 6 * 3
    for index in range(6):
        world.check_output(f"r{index}")


def test_who_waits_for_a_prefix_goes_ahead_when_its_owner_is_gone() -> None:
    world = SchedulerWorld(make_config(budget=8), num_blocks=64)
    prompt = fresh_prompt(24)
    world.add(make_request("owner", prompt))
    world.add(make_request("follower", prompt, max_tokens=2))
    assert len(world.step().new_rows) == 1

    world.abort("owner")
    world.run()

    world.check_output("follower")


def test_others_overtake_who_waits_for_a_prefix() -> None:
    world = SchedulerWorld(make_config(budget=40), num_blocks=64)
    prompt = fresh_prompt(24)
    for name, tokens in (("owner", prompt), ("follower", prompt), ("other", fresh_prompt(5))):
        world.add(make_request(name, tokens, max_tokens=3))

    assert [new_row.request_id for new_row in world.step().new_rows] == ["owner", "other"]
    assert [new_row.request_id for new_row in world.step().new_rows] == ["follower"]


@pytest.mark.behaviour("B5")
def test_b5_a_reset_drops_the_cache() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32)
    prompt = fresh_prompt(10)
    finished(world, prompt)

    assert world.scheduler.reset_prefix_cache() == CacheReset(num_blocks=2)

    assert first_positions(world, prompt) == [0]


@pytest.mark.behaviour("B5")
def test_b5_a_reset_is_refused_while_something_runs_unless_it_may_preempt() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32)
    prompt = fresh_prompt(10)
    world.add(make_request("a", prompt, max_tokens=6))
    world.step()
    assert not world.scheduler.reset_prefix_cache()

    assert world.scheduler.reset_prefix_cache(preempt_running=True) == CacheReset(num_blocks=2, num_preempted=1)

    output = world.step()
    assert (output.released_rows.tolist(), output.first_positions.tolist()) == ([0], [0])
    world.run()
    world.check_output("a")


@pytest.mark.behaviour("B5")
def test_b5_what_a_load_still_brings_after_a_reset_is_not_used() -> None:
    world = SchedulerWorld(make_config(seqs=1), num_blocks=32)
    for name in ("loaded", "loading"):
        prompt = fresh_prompt(12)
        world.add(make_request(name, prompt, max_tokens=3, kv_transfer=world.connector.offer(prompt)))
    world.step()
    world.end_load("loaded")

    assert world.scheduler.reset_prefix_cache(preempt_running=True)
    output = world.step()

    assert output.first_positions.tolist() == [0]
    world.end_load("loading")
    world.run()
    world.check_output("loaded")
    world.check_output("loading")
    assert world.scheduler.stats().num_free_blocks == 32


@pytest.mark.behaviour("B5")
def test_b5_a_reset_with_a_step_in_flight_drops_what_that_step_gives() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32)
    world.add(make_request("a", 10, max_tokens=4))
    world.schedule()
    world.scheduler.reset_prefix_cache(preempt_running=True)
    world.complete_step()

    assert world.endings["a"].token_ids == []
    world.run()
    world.check_output("a")


@pytest.mark.behaviour("B6")
def test_b6_the_leading_blocks_that_all_running_requests_share_are_counted() -> None:
    world = SchedulerWorld(make_config(), num_blocks=64)
    prefix = fresh_prompt(12)
    finished(world, prefix)
    assert world.scheduler.num_common_prefix_blocks() == 0

    world.add(make_request("a", (*prefix, *fresh_prompt(5))))
    world.step()
    assert world.scheduler.num_common_prefix_blocks() == 5, "one request shares everything with itself"
    world.add(make_request("b", (*prefix, *fresh_prompt(5))))
    world.step()
    assert world.scheduler.num_common_prefix_blocks() == 3
    world.add(make_request("c", 5))
    world.step()

    assert world.scheduler.num_common_prefix_blocks() == 0
