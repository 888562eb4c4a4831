"""KV cache groups with windows and a tier of evicted blocks: cached blocks and the tier's blocks form one prefix."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.engine.scheduler.test_sliding_windows import windowed_world
from tests.support.scheduler.scheduler_requests import fresh_prompt, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld


@pytest.mark.behaviour("B7")
def test_tier_supplies_of_a_window_what_is_seen_from_the_end_of_its_part() -> None:
    world = windowed_world((None, 8), num_blocks=24, num_tier_slots=64)
    prompt = fresh_prompt(40)
    world.add(make_request("a", prompt, max_tokens=1))
    world.run()
    for number in range(3):
        world.add(make_request(f"other-{number}", 40, max_tokens=1))
        world.run()

    world.add(make_request("b", prompt, max_tokens=1))
    world.step()

    assert world.tier is not None
    assert len(world.tier.open_loads["b"].block_ids) == 9 + 2
    world.end_load("b")
    world.run()
    world.check_output("b")


def partly_evicted(
    num_other_tokens: int, windows: Sequence[int | None] = (None, 8), *, num_blocks: int = 24
) -> SchedulerWorld:
    """A world in which a prompt of 10 blocks was computed, and then another one had some of its blocks evicted.

    "b" asks for the same prompt, and its load has begun.
    """
    world = windowed_world(windows, num_blocks=num_blocks, num_tier_slots=64)
    prompt = fresh_prompt(40)
    world.add(make_request("a", prompt, max_tokens=1))
    world.run()
    world.add(make_request("other", num_other_tokens, max_tokens=1))
    world.run()
    world.add(make_request("b", prompt, max_tokens=1))
    world.step()
    return world


@pytest.mark.behaviour("B7")
@pytest.mark.parametrize("num_other_tokens, num_loaded", [(24, 1), (32, 3), (40, 7)])
def test_tier_supplies_what_the_cache_lacks_behind_a_local_prefix(num_other_tokens: int, num_loaded: int) -> None:
    """Nine blocks of the group that sees everything and two of the window: what is cached of them is not loaded."""
    world = partly_evicted(num_other_tokens)

    assert world.tier is not None
    assert len(world.tier.open_loads["b"].block_ids) == num_loaded
    num_before = world.runner.num_computed_positions
    world.end_load("b")
    world.run()
    world.check_output("b")
    assert world.runner.num_computed_positions - num_before == 4


@pytest.mark.behaviour("B7")
@pytest.mark.behaviour("K4")
def test_k4_damage_beside_shared_blocks_has_all_computed_in_blocks_of_its_own() -> None:
    world = partly_evicted(28, (None, 64), num_blocks=25)
    load = world.scheduler._live_requests._remote.wanted_load("b")
    assert load is not None
    assert load.shared

    world.end_load("b", [0])
    output = world.step()

    assert output.first_positions.tolist() == [load.first_block * 4]
    assert load.shared.isdisjoint(output.new_rows[0].block_ids[:, load.first_block :].ravel().tolist())
    world.run()
    world.check_output("b")


@pytest.mark.behaviour("B7")
def test_what_another_request_computed_meanwhile_is_taken_as_far_as_blocks_are_held() -> None:
    """Two load the same beginning; the one that waits for the row takes over blocks that the other one computes."""
    world = windowed_world((None, 5), num_blocks=18, num_tier_slots=64, seqs=1, long_prefill_token_threshold=3)
    prompt = fresh_prompt(17)
    world.add(make_request("a", prompt[:9], max_tokens=1))
    world.run()
    for number in range(3):
        world.add(make_request(f"other-{number}", 28, max_tokens=1))
        world.run()
    for name in ("first", "second"):
        world.add(make_request(name, prompt, max_tokens=2))
    world.step()

    assert world.tier is not None
    assert set(world.tier.open_loads) == {"first", "second"}
    for name in ("first", "second"):
        world.end_load(name)
    world.run()
    world.check_output("first")
    world.check_output("second")
    assert world.scheduler.stats().num_adopted_blocks > 0
