"""Requests of higher priority preempt lower ones, but only if that lets them start: O2."""

from __future__ import annotations

import pytest

from engine.contract.config import SchedulerConfig
from tests.support.router.decode_world import add_handed_over, first_token
from tests.support.scheduler.scheduler_requests import fresh_prompt, make_config, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld


def o2_config(**options: object) -> SchedulerConfig:
    """Priorities that may preempt."""
    return make_config(policy="priority", enable_priority_preemption=True, **options)  # type: ignore[arg-type]


def running(world: SchedulerWorld) -> list[str]:
    """Who has a row."""
    return [request.request_id for request in world.scheduler._table.running()]


def num_preemptions(world: SchedulerWorld) -> int:
    """How often anybody lost its place."""
    return world.scheduler.stats().num_preemptions


def run_all(world: SchedulerWorld) -> None:
    """Let every load end and every request, and compare the outputs."""
    world.run()
    while world.scheduler.has_unfinished():
        for request_id in list(world.connector.open_loads):
            world.end_load(request_id)
        world.run()
    for request_id in world.requests:
        world.check_output(request_id)


@pytest.mark.behaviour("O2")
def test_o2_a_request_of_higher_priority_takes_the_place_of_a_lower_one() -> None:
    world = SchedulerWorld(o2_config(), num_blocks=10)
    world.add(make_request("low", 16, max_tokens=8, priority=5))
    world.add(make_request("mid", 12, max_tokens=8, priority=3))
    world.step()
    world.add(make_request("high", 16, max_tokens=4, priority=1))

    world.step()

    assert sorted(running(world)) == ["high", "mid"]
    world.run()
    for name in ("low", "mid", "high"):
        world.check_output(name)


@pytest.mark.behaviour("O2")
def test_o2_nobody_is_preempted_when_that_would_not_be_enough() -> None:
    world = SchedulerWorld(o2_config(), num_blocks=10)
    world.add(make_request("top", 20, max_tokens=4, priority=0))
    world.add(make_request("low", 8, max_tokens=4, priority=5))
    world.step()
    world.add(make_request("high", 30, max_tokens=4, priority=1))

    world.step()

    assert sorted(running(world)) == ["low", "top"]
    assert world.scheduler.stats().num_preemptions == 0


@pytest.mark.behaviour("O2")
def test_o2_a_row_is_taken_over_too() -> None:
    world = SchedulerWorld(o2_config(seqs=1), num_blocks=32)
    world.add(make_request("low", 8, priority=5))
    world.step()
    world.add(make_request("equal", 8, priority=5))
    world.step()
    assert running(world) == ["low"], "only a lower priority gives way"

    world.add(make_request("high", 8, priority=1))
    world.step()

    assert running(world) == ["high"]


@pytest.mark.behaviour("O2")
def test_o2_nobody_is_preempted_for_a_request_that_waits_for_what_another_one_loads() -> None:
    world = SchedulerWorld(o2_config(), num_blocks=12)
    prompt = fresh_prompt(16)
    world.add(make_request("low", 12, max_tokens=20, priority=5))
    world.step()
    for name in ("loads", "waits"):
        world.add(make_request(name, prompt, output=(1,), kv_transfer=world.connector.offer(prompt), max_tokens=3))
        world.step()

    for _ in range(3):
        world.step()
    assert world.scheduler.stats().num_preemptions == 0

    world.end_load("loads")
    world.run()
    world.check_output("waits")


@pytest.mark.behaviour("O2")
def test_o2_without_the_option_priority_inversion_ends_by_waiting() -> None:
    world = SchedulerWorld(make_config(policy="priority"), num_blocks=10)
    world.add(make_request("low", 30, max_tokens=4, priority=5))
    world.step()
    world.add(make_request("high", 16, max_tokens=4, priority=1))
    world.run()

    world.check_output("low")
    world.check_output("high")
    assert world.scheduler.stats().num_preemptions == 0


# ---- loads need blocks and no row


@pytest.mark.behaviour("O2")
def test_o2_a_loaded_request_of_higher_priority_takes_a_row() -> None:
    world = SchedulerWorld(o2_config(seqs=2), num_blocks=32)
    world.add(make_request("low", 8, max_tokens=30, priority=5))
    world.step()
    add_handed_over(world, "high", fresh_prompt(16), max_tokens=3, priority=1)
    world.step()
    world.add(make_request("lower", 8, max_tokens=30, priority=6))
    world.step()
    assert running(world) == ["low", "lower"]

    world.end_load("high")
    world.step()

    assert running(world) == ["low", "high"]
    assert num_preemptions(world) == 1
    run_all(world)


@pytest.mark.behaviour("O2")
def test_o2_a_loaded_request_takes_no_row_of_its_own_priority() -> None:
    world = SchedulerWorld(o2_config(seqs=2), num_blocks=32)
    add_handed_over(world, "loads", fresh_prompt(16), max_tokens=3, priority=5)
    world.step()
    for name in ("one", "two"):
        world.add(make_request(name, 8, max_tokens=4, priority=5))
    world.step()
    world.end_load("loads")
    world.step()

    assert running(world) == ["one", "two"]
    run_all(world)
    assert num_preemptions(world) == 0


@pytest.mark.behaviour("O2")
def test_o2_a_load_begins_without_a_row_and_takes_one_when_it_ended() -> None:
    world = SchedulerWorld(o2_config(seqs=1), num_blocks=32)
    world.add(make_request("low", 8, max_tokens=30, priority=5))
    world.step()
    add_handed_over(world, "high", fresh_prompt(16), max_tokens=3, priority=1)
    for _ in range(3):
        world.step()

    assert list(world.connector.open_loads) == ["high"]
    assert running(world) == ["low"], "a load needs no row"

    world.end_load("high")
    world.step()
    assert running(world) == ["high"]
    assert num_preemptions(world) == 1
    run_all(world)


@pytest.mark.behaviour("O2")
def test_o2_a_load_that_outranks_nobody_begins_when_a_row_is_free() -> None:
    world = SchedulerWorld(o2_config(seqs=1), num_blocks=32)
    world.add(make_request("runs", 8, max_tokens=3, priority=1))
    world.step()
    add_handed_over(world, "equal", fresh_prompt(16), max_tokens=3, priority=1)
    world.step()

    assert not world.connector.open_loads
    run_all(world)


@pytest.mark.behaviour("O2")
def test_o2_a_load_takes_the_blocks_that_it_lacks() -> None:
    world = SchedulerWorld(o2_config(seqs=2), num_blocks=8)
    world.add(make_request("low", 16, max_tokens=5, priority=5))
    world.step()
    add_handed_over(world, "high", fresh_prompt(24), max_tokens=3, priority=1)
    world.step()

    assert list(world.connector.open_loads) == ["high"]
    assert num_preemptions(world) == 1
    run_all(world)


# ---- nobody gives way for nothing


@pytest.mark.behaviour("O2")
def test_o2_nobody_is_preempted_for_a_request_that_a_gate_passes_over() -> None:
    world = SchedulerWorld(o2_config(seqs=3, budget=12, max_num_partial_prefills=1), num_blocks=24)
    world.add(make_request("low", 30, max_tokens=12, priority=5))
    for _ in range(4):
        world.step()
    world.add(make_request("top", 40, max_tokens=2, priority=0))
    world.step()
    world.add(make_request("high", 40, max_tokens=2, priority=1))
    world.step()

    assert running(world) == ["low", "top"], "one prompt is computed in part at a time"
    assert num_preemptions(world) == 0
    run_all(world)


@pytest.mark.behaviour("O2")
def test_o2_nobody_is_preempted_for_a_request_that_is_held_back_for_a_batch_to_form() -> None:
    world = SchedulerWorld(o2_config(seqs=2, scheduler_delay_factor=100.0), num_blocks=32)
    world.add(make_request("top", 8, max_tokens=12, priority=0))
    world.add(make_request("low", 8, max_tokens=12, priority=5))
    world.schedule()
    world.now_s += 1.0
    world.complete_step()
    world.add(make_request("high", 8, max_tokens=2, priority=1))
    for _ in range(3):
        world.step()

    assert sorted(running(world)) == ["low", "top"]
    assert num_preemptions(world) == 0
    run_all(world)


@pytest.mark.behaviour("O2")
def test_o2_who_is_the_only_prompt_computed_in_part_gives_way_to_another_one() -> None:
    world = SchedulerWorld(o2_config(seqs=1, budget=8, max_num_partial_prefills=1), num_blocks=32)
    world.add(make_request("low", 40, max_tokens=2, priority=5))
    world.step()
    world.add(make_request("high", 40, max_tokens=2, priority=1))
    world.step()

    assert running(world) == ["high"]
    run_all(world)


@pytest.mark.behaviour("O2")
def test_o2_nobody_is_preempted_while_others_take_all_tokens_of_the_step() -> None:
    world = SchedulerWorld(o2_config(seqs=2, budget=8), num_blocks=32)
    world.add(make_request("low", 4, max_tokens=30, priority=5))
    world.step()
    world.add(make_request("top", 40, max_tokens=2, priority=0))
    world.step()
    world.add(make_request("high", 8, max_tokens=2, priority=1))
    world.step()

    assert sorted(running(world)) == ["low", "top"]
    assert num_preemptions(world) == 0
    run_all(world)


@pytest.mark.behaviour("O2")
def test_o2_an_undecided_request_costs_nobody_its_place() -> None:
    world = SchedulerWorld(o2_config(seqs=1), num_blocks=32)
    world.add(make_request("low", 8, max_tokens=30, priority=5))
    world.step()
    prompt = fresh_prompt(16)
    offer = world.connector.offer(prompt, is_known=False)
    world.add(make_request("high", prompt, output=first_token(prompt), kv_transfer=offer, max_tokens=3, priority=1))
    for _ in range(10):
        world.step()
        world.now_s += world.config.ask_again_s

    assert running(world) == ["low"]
    assert num_preemptions(world) == 0

    world.connector.undecided.clear()
    world.step()
    assert list(world.connector.open_loads) == ["high"]
    run_all(world)


@pytest.mark.behaviour("O2")
def test_o2_who_waits_behind_an_undecided_request_takes_a_place() -> None:
    world = SchedulerWorld(o2_config(seqs=1), num_blocks=32)
    world.add(make_request("low", 8, max_tokens=30, priority=5))
    world.step()
    prompt = fresh_prompt(16)
    offer = world.connector.offer(prompt, is_known=False)
    world.add(make_request("undecided", prompt, kv_transfer=offer, max_tokens=3, priority=0))
    world.add(make_request("high", 8, max_tokens=3, priority=1))
    world.step()

    assert running(world) == ["high"]
    world.connector.undecided.clear()
    world.now_s += 1.0
    run_all(world)


# ---- who gives way


@pytest.mark.behaviour("O2")
def test_o2_two_that_share_blocks_give_way_together() -> None:
    world = SchedulerWorld(o2_config(), num_blocks=10)
    prompt = fresh_prompt(21)
    world.add(make_request("first", prompt, max_tokens=3, priority=5))
    world.step()
    world.add(make_request("second", prompt, max_tokens=3, priority=5))
    world.step()
    assert world.scheduler.stats().num_free_blocks == 3, "five blocks are shared"
    world.add(make_request("high", 32, max_tokens=2, priority=1))
    world.step()

    assert running(world) == ["high"]
    assert num_preemptions(world) == 2
    run_all(world)


@pytest.mark.behaviour("O2")
def test_o2_who_does_not_help_keeps_its_place() -> None:
    world = SchedulerWorld(o2_config(), num_blocks=10)
    world.add(make_request("big", 20, max_tokens=4, priority=5, arrival_s=0.0))
    world.step()
    world.add(make_request("small", 3, max_tokens=6, priority=5, arrival_s=1.0))
    world.step()
    world.add(make_request("high", 24, max_tokens=2, priority=1))
    world.step()

    assert sorted(running(world)) == ["high", "small"]
    run_all(world)


@pytest.mark.behaviour("O2")
def test_o2_room_that_is_kept_for_those_who_give_way_is_not_missing() -> None:
    world = SchedulerWorld(o2_config(watermark=0.2), num_blocks=10)
    world.add(make_request("low", 20, max_tokens=16, priority=5))
    world.step()
    world.add(make_request("high", 36, max_tokens=4, priority=1))
    world.step()

    assert running(world) == ["high"]
    run_all(world)


@pytest.mark.behaviour("O2")
def test_o2_a_place_that_was_made_is_not_taken_by_a_loaded_request_of_lower_priority() -> None:
    world = SchedulerWorld(o2_config(seqs=2), num_blocks=32)
    world.add(make_request("top", 8, max_tokens=30, priority=0))
    world.step()
    add_handed_over(world, "loaded", fresh_prompt(8), max_tokens=3, priority=4)
    world.step()
    world.add(make_request("low", 8, max_tokens=30, priority=5))
    world.step()
    assert running(world) == ["top", "low"]
    world.add(make_request("high", 8, max_tokens=3, priority=1))
    world.end_load("loaded")
    world.step()

    assert running(world) == ["top", "high"]
    assert num_preemptions(world) == 1
    run_all(world)


@pytest.mark.behaviour("O2")
def test_o2_a_place_is_kept_until_the_steps_in_flight_have_returned() -> None:
    world = SchedulerWorld(o2_config(seqs=2), num_blocks=16)
    world.add(make_request("top", 8, max_tokens=20, priority=0))
    world.step()
    add_handed_over(world, "loaded", fresh_prompt(8), max_tokens=3, priority=4)
    world.step()
    world.add(make_request("low", 16, max_tokens=10, priority=5))
    world.step()
    assert running(world) == ["top", "low"]
    world.schedule()
    world.end_load("loaded")
    world.add(make_request("high", 20, max_tokens=3, priority=1))
    world.schedule()
    assert running(world) == ["top"], "the blocks of the one that gave way may still be written"
    world.complete_step()
    world.complete_step()
    world.step()

    assert running(world) == ["top", "high"]
    assert num_preemptions(world) == 1
    run_all(world)
