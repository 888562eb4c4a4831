"""Loads that fail in part, one after the other, shared, or never end: K4, K6, known-failure 11."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.contract.messages import FinishReason
from engine.scheduler.requests.request import Request
from tests.support.router.decode_world import add_handed_over, decode_world, first_token
from tests.support.scheduler.scheduler_requests import fresh_prompt, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld

# ---- K4


@pytest.mark.behaviour("K4")
def test_k4_exactly_the_damaged_blocks_are_recomputed() -> None:
    world = decode_world()
    add_handed_over(world, "a", fresh_prompt(24), max_tokens=3)
    world.step()
    world.end_load("a", [1, 2, 4])

    steps = [world.step() for _ in range(3)]

    ranges = [(int(step.first_positions[0]), int(step.num_scheduled_tokens[0])) for step in steps]
    assert ranges == [(4, 8), (16, 4), (24, 1)]
    assert [int(step.num_samples[0]) for step in steps] == [0, 0, 1]
    world.run()
    world.check_output("a")
    stats = world.scheduler.stats()
    assert (stats.failed_blocks, stats.recomputed_tokens, stats.remote_hit_tokens) == (3, 12, 12)
    assert world.endings["a"].num_remote_tokens == 12


@pytest.mark.behaviour("K4")
def test_k4_the_fallback_recomputes_from_the_first_damaged_block_on() -> None:
    world = decode_world(recompute_damaged_only=False)
    add_handed_over(world, "a", fresh_prompt(24), max_tokens=3)
    world.step()
    world.end_load("a", [1, 4])

    output = world.step()

    assert (output.first_positions.tolist(), output.num_scheduled_tokens.tolist()) == ([4], [21])
    world.run()
    world.check_output("a")


@pytest.mark.behaviour("K4")
def test_k4_damage_at_the_end_joins_what_is_computed_anyway() -> None:
    world = decode_world()
    add_handed_over(world, "a", fresh_prompt(22), max_tokens=3)
    world.step()
    world.end_load("a", [4, 5])

    output = world.step()

    assert (output.first_positions.tolist(), output.num_scheduled_tokens.tolist()) == ([16], [7])
    world.run()
    world.check_output("a")


@pytest.mark.behaviour("K4")
def test_k4_valid_blocks_behind_a_hole_are_published_at_once_and_the_hole_when_it_is_filled() -> None:
    world = decode_world()
    prompt = fresh_prompt(16)
    add_handed_over(world, "a", prompt)
    world.step()
    world.end_load("a", [1])

    assert published(world, prompt) == [True, False, True, True]
    world.step()
    assert published(world, prompt) == [True, True, True, True]


def published(world: SchedulerWorld, prompt: tuple[int, ...]) -> list[bool]:
    """Which blocks of a prompt can be found."""
    probe = Request(make_request("probe", prompt), arrival_index=0, full_limit=0, queued_at_s=0.0)
    return [
        world.scheduler._kv_cache.find_column(block_hash) != [None] for block_hash in probe.hashes(world.block_size)
    ]


@pytest.mark.behaviour("K4")
def test_k4_holes_larger_than_the_budget_are_filled_in_chunks() -> None:
    world = decode_world(budget=6)
    add_handed_over(world, "a", fresh_prompt(24), max_tokens=3)
    world.step()
    world.end_load("a", [0, 1, 2, 4])
    world.run()

    world.check_output("a")
    assert world.runner.num_computed_positions == 16 + 2


@pytest.mark.behaviour("K4")
def test_k4_failures_one_after_the_other() -> None:
    world = decode_world()
    for index in range(3):
        add_handed_over(world, f"r{index}", fresh_prompt(16), max_tokens=4)
    world.step()
    for index in range(3):
        world.end_load(f"r{index}", [index])
        world.step()
    world.run()

    for index in range(3):
        world.check_output(f"r{index}")
    assert world.scheduler.stats().recomputed_tokens == 12


@pytest.mark.behaviour("K4")
def test_k4_damaged_blocks_that_several_requests_share_are_recomputed_once() -> None:
    world = decode_world(seqs=4)
    prompt = fresh_prompt(24)
    for index in range(3):
        add_handed_over(world, f"r{index}", prompt, max_tokens=2)
    world.step()
    world.end_load("r0", [1, 3])
    world.step()
    assert world.connector.open_loads["r1"].first_block == 1, "what the first load did not bring"
    world.end_load("r1", [0, 2])
    world.run()
    world.end_load("r2")
    world.run()

    for index in range(3):
        world.check_output(f"r{index}")
    assert world.runner.num_computed_positions == 8 + 3, "each invalid span once, then one step each"
    assert world.scheduler.stats().num_adopted_blocks == 2


@pytest.mark.behaviour("K4")
@pytest.mark.known_failure(11)
def test_k4_known_failure_11_damaged_blocks_are_never_published() -> None:
    world = decode_world()
    prompt = fresh_prompt(16)
    add_handed_over(world, "a", prompt)
    world.step()
    world.end_load("a", [0, 1, 2, 3])
    world.abort("a")

    world.add(make_request("same prompt", prompt, max_tokens=2))

    assert world.step().first_positions.tolist() == [0]


@pytest.mark.behaviour("K4")
def test_k4_a_damaged_request_survives_preemption() -> None:
    world = decode_world(num_blocks=16, seqs=3)
    world.add(make_request("a", 6, max_tokens=40))
    add_handed_over(world, "b", fresh_prompt(24), max_tokens=20)
    world.step()
    world.end_load("b", [0, 2, 4])
    world.run()

    assert world.scheduler.stats().num_preemptions > 0
    world.check_output("a")
    world.check_output("b")


# ---- nobody waits for a request that has ended


def run_again_after_eviction(world: SchedulerWorld, prompt: tuple[int, ...], *, num_tokens: int = 63) -> None:
    """Evict by a prompt of this many tokens, then run one more request with the given prompt; no other request
    is left.
    """
    world.add(make_request("takes blocks", num_tokens, max_tokens=1))
    world.run()
    world.add(make_request("the next one", prompt, max_tokens=2))
    for _ in range(4):
        world.step()

    assert not world.scheduler.is_stuck()
    world.check_output("the next one")


@pytest.mark.known_failure(26)
def test_known_failure_26_a_damaged_block_that_was_computed_meanwhile_is_claimed_by_nobody() -> None:
    world = decode_world(num_blocks=16)
    prompt = fresh_prompt(12)
    add_handed_over(world, "loads", prompt, max_tokens=3)
    world.step()
    world.add(make_request("computes", prompt, max_tokens=2))
    world.step()
    world.end_load("loads", [0])
    world.run()

    for name in ("loads", "computes"):
        world.check_output(name)
    run_again_after_eviction(world, prompt)


@pytest.mark.known_failure(26)
def test_known_failure_26_choices_whose_loads_are_damaged_one_after_the_other_leave_no_claim() -> None:
    world = decode_world(num_blocks=16)
    prompt = fresh_prompt(12)
    for name in ("first", "second", "third"):
        add_handed_over(world, name, prompt, max_tokens=3)
    world.step()
    world.end_load("first", [0])
    world.schedule()
    world.abort("first")
    world.step()
    for name in ("second", "third"):
        world.end_load(name, [0])
        world.step()
    world.run()

    for name in ("second", "third"):
        world.check_output(name)
    run_again_after_eviction(world, prompt)


@pytest.mark.known_failure(26)
def test_known_failure_26_a_block_behind_a_hole_that_is_taken_from_others_is_not_claimed_any_more() -> None:
    world = decode_world(num_blocks=16)
    prompt = fresh_prompt(16)
    for name in ("first", "second"):
        add_handed_over(world, name, prompt, max_tokens=3)
    world.step()
    world.end_load("first", [0])
    world.schedule()
    world.abort("first")
    world.step()
    world.end_load("second", [0, 2])
    world.run()

    world.check_output("second")
    world.add(make_request("uses the first two blocks", prompt[:9], max_tokens=1))
    world.run()
    run_again_after_eviction(world, prompt, num_tokens=55)


# ---- K6


@pytest.mark.behaviour("K6")
def test_k6_policy_fail_ends_the_request_with_an_error_that_says_why() -> None:
    world = decode_world(load_failure_policy="fail")
    add_handed_over(world, "a", fresh_prompt(12))
    world.step()

    world.end_load("a", [1])

    last = world.endings["a"].last
    assert last is not None
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None
    assert last.error.code == "kv_load_failed"
    assert "1 KV blocks" in last.error.message
    assert "the read failed" in last.error.message
    assert world.scheduler.stats().num_free_blocks == 32


@pytest.mark.behaviour("K6")
def test_k6_policy_fail_does_not_mind_loads_that_succeed() -> None:
    world = decode_world(load_failure_policy="fail")
    add_handed_over(world, "a", fresh_prompt(12), max_tokens=3)
    world.step()
    world.end_load("a")
    world.run()

    world.check_output("a")


@pytest.mark.behaviour("K6")
@pytest.mark.parametrize("limit", [None, 0])
def test_k6_damage_to_what_is_computed_in_any_case_fails_nothing(limit: int | None) -> None:
    world = decode_world(load_failure_policy="fail" if limit is None else "recompute")
    prompt = fresh_prompt(13)
    # Nothing was sampled yet: the last token is computed here, and its block holds nothing else.
    request = make_request("a", prompt, max_tokens=3, kv_transfer=world.connector.offer(prompt))
    world.add(replace(request, max_recomputed_tokens=limit))
    world.step()
    world.end_load("a", [3])
    world.run()

    world.check_output("a")
    stats = world.scheduler.stats()
    assert (stats.failed_blocks, stats.recomputed_tokens, stats.remote_hit_tokens) == (0, 0, 12)


@pytest.mark.parametrize(("limit", "is_given_back"), [(0, True), (3, True), (4, False), (None, False)])
def test_request_goes_back_when_more_is_lost_than_its_sender_wants_computed(
    limit: int | None, is_given_back: bool
) -> None:
    world = decode_world()
    prompt = fresh_prompt(12)
    offer = world.connector.offer(prompt)
    request = make_request("a", prompt, output=first_token(prompt), kv_transfer=offer)
    world.add(replace(request, max_recomputed_tokens=limit))
    world.step()
    world.end_load("a", [1])
    if not is_given_back:
        world.run()
        world.check_output("a")
        return

    last = world.endings["a"].last
    assert last is not None
    assert last.error is not None
    assert last.error.code == "kv_lost"
    assert "the read failed" in last.error.message
