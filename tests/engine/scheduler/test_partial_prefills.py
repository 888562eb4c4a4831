"""Short prompts overtake long ones: O3. New prompts are held back: O4."""

from __future__ import annotations

import pytest

from engine.contract.step import SchedulerOutput
from tests.support.router.decode_world import add_handed_over
from tests.support.scheduler.scheduler_requests import fresh_prompt, make_config, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld


def started(output: SchedulerOutput) -> list[str]:
    """Who got a row in this step."""
    return [new_row.request_id for new_row in output.new_rows]


@pytest.mark.behaviour("O3")
def test_o3_no_more_than_max_num_partial_prefills_are_under_way() -> None:
    world = SchedulerWorld(make_config(seqs=8, budget=16, max_num_partial_prefills=2), num_blocks=64)
    for index in range(4):
        world.add(make_request(f"r{index}", 30, max_tokens=1))

    assert started(world.step()) == ["r0", "r1"]
    assert started(world.step()) == []
    world.run()
    for index in range(4):
        world.check_output(f"r{index}")


@pytest.mark.behaviour("O3")
def test_o3_the_budget_is_split_evenly_in_whole_blocks() -> None:
    world = SchedulerWorld(make_config(seqs=8, budget=22, max_num_partial_prefills=2), num_blocks=64)
    world.add(make_request("a", 40, max_tokens=1))
    world.add(make_request("b", 40, max_tokens=1))

    counts = [world.step().num_scheduled_tokens.tolist() for _ in range(2)]

    assert counts == [[8, 8], [8, 8]]


@pytest.mark.behaviour("O3")
def test_o3_without_prefix_caching_shares_need_not_be_whole_blocks() -> None:
    config = make_config(seqs=8, budget=22, max_num_partial_prefills=2)
    world = SchedulerWorld(config, num_blocks=64, enable_prefix_caching=False)
    world.add(make_request("a", 40, max_tokens=1))
    world.add(make_request("b", 40, max_tokens=1))

    assert world.step().num_scheduled_tokens.tolist() == [11, 11]


@pytest.mark.behaviour("O3")
def test_o3_short_prompts_overtake_when_long_ones_are_limited() -> None:
    config = make_config(
        seqs=8, budget=16, max_num_partial_prefills=2, max_long_partial_prefills=1, long_prefill_token_threshold=20
    )
    world = SchedulerWorld(config, num_blocks=64)
    for name, num_tokens in (("long 1", 50), ("long 2", 50), ("short", 6)):
        world.add(make_request(name, num_tokens, max_tokens=2))

    assert started(world.step()) == ["long 1", "short"]
    world.run()
    world.check_output("long 2")


@pytest.mark.behaviour("O3")
def test_o3_prefills_about_to_finish_come_first() -> None:
    world = SchedulerWorld(make_config(seqs=8, budget=20, max_num_partial_prefills=3), num_blocks=64)
    world.add(make_request("long", 60, max_tokens=1))
    world.add(make_request("nearly", 12, max_tokens=1))
    world.add(make_request("other", 60, max_tokens=1))
    world.step()
    assert world.step().num_scheduled_tokens.tolist() == [4, 4, 4]

    output = world.step()

    assert output.num_scheduled_tokens.tolist() == [4, 4, 4]
    assert output.num_samples.tolist() == [0, 1, 0]


@pytest.mark.behaviour("O3")
def test_o3_decodes_are_not_held_up() -> None:
    world = SchedulerWorld(make_config(seqs=4, budget=12, max_num_partial_prefills=1), num_blocks=64)
    world.add(make_request("decodes", 4, max_tokens=30))
    world.step()
    world.add(make_request("long", 50, max_tokens=2))
    counts = [world.step().num_scheduled_tokens.tolist() for _ in range(3)]

    assert all(count[0] == 1 for count in counts)
    world.run()
    world.check_output("decodes")
    world.check_output("long")


@pytest.mark.behaviour("O3")
def test_o3_a_load_that_leaves_nothing_to_compute_is_no_partial_prefill() -> None:
    world = SchedulerWorld(make_config(seqs=8, budget=18, max_num_partial_prefills=1), num_blocks=64)
    world.add(make_request("long", 60, max_tokens=2))
    world.step()
    add_handed_over(world, "handed over", fresh_prompt(40), max_tokens=2)

    world.step()

    assert list(world.connector.open_loads) == ["handed over"]
    world.end_load("handed over")
    assert started(world.step()) == ["handed over"]
    world.run()
    for name in ("long", "handed over"):
        world.check_output(name)


@pytest.mark.behaviour("O3")
def test_o3_a_load_that_leaves_much_to_compute_waits_like_any_prefill() -> None:
    world = SchedulerWorld(make_config(seqs=8, budget=16, max_num_partial_prefills=1), num_blocks=64)
    world.add(make_request("long", 60, max_tokens=2))
    world.step()
    prompt = fresh_prompt(40)
    world.add(make_request("part", prompt, max_tokens=2, kv_transfer=world.connector.offer(prompt[:4])))

    world.step()

    assert not world.connector.open_loads
    while world.scheduler.has_unfinished():
        world.step()
        for request_id in list(world.connector.open_loads):
            world.end_load(request_id)
    world.check_output("part")


@pytest.mark.behaviour("O3")
def test_o3_a_prompt_that_is_cached_but_for_its_end_is_no_partial_prefill() -> None:
    world = SchedulerWorld(make_config(seqs=8, budget=18, max_num_partial_prefills=1), num_blocks=64)
    prompt = fresh_prompt(41)
    world.add(make_request("earlier", prompt, max_tokens=1))
    world.run()
    world.add(make_request("long", 60, max_tokens=2))
    world.step()
    world.add(make_request("cached", prompt, max_tokens=2))

    assert started(world.step()) == ["cached"]
    world.run()
    world.check_output("cached")


def timed_step(world: SchedulerWorld, seconds: float) -> SchedulerOutput:
    """A step that takes so long."""
    output = world.schedule()
    world.now_s += seconds
    world.complete_step()
    return output


@pytest.mark.behaviour("O4")
def test_o4_new_prompts_wait_a_multiple_of_the_last_prompts_latency_so_that_a_batch_forms() -> None:
    world = SchedulerWorld(make_config(scheduler_delay_factor=2.0), num_blocks=64)
    world.add(make_request("first", 6))
    assert started(timed_step(world, 1.0)) == ["first"], "nothing runs: nothing is held back"

    world.add(make_request("second", 6))
    assert started(timed_step(world, 1.5)) == []
    world.add(make_request("third", 6))
    assert started(timed_step(world, 0.6)) == []

    assert started(timed_step(world, 0.1)) == ["second"], "two seconds are over"


@pytest.mark.behaviour("O4")
def test_o4_when_nothing_runs_any_more_nothing_is_held_back() -> None:
    world = SchedulerWorld(make_config(scheduler_delay_factor=100.0), num_blocks=64)
    world.add(make_request("first", 6, max_tokens=2))
    timed_step(world, 5.0)
    world.add(make_request("second", 6, max_tokens=2))
    assert started(timed_step(world, 0.1)) == []

    assert started(timed_step(world, 0.1)) == ["second"]


@pytest.mark.behaviour("O4")
def test_o4_a_request_that_was_preempted_is_not_held_back() -> None:
    config = make_config(
        scheduler_delay_factor=100.0, artificial_preemption_probability=1.0, max_num_artificial_preemptions=1
    )
    world = SchedulerWorld(config, num_blocks=64)
    world.add(make_request("first", 6, max_tokens=5))
    timed_step(world, 5.0)
    assert timed_step(world, 0.1).rows.size == 0

    assert started(timed_step(world, 0.1)) == ["first"]
