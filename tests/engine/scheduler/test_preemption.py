"""Which requests give up their blocks, and what that costs: C6, C7, O6."""

from __future__ import annotations

import pytest

from engine.scheduler.policy.preemption import ArtificialPreemption, PreemptionPolicy
from tests.support.scheduler.scheduler_requests import make_config, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld


def run_until_preempted(world: SchedulerWorld) -> None:
    """Step until a request was preempted."""
    for _ in range(100):
        world.step()
        if world.scheduler.stats().num_preemptions:
            return
    raise AssertionError("nobody was preempted")


def running(world: SchedulerWorld) -> list[str]:
    """Who has a row."""
    return [request.request_id for request in world.scheduler._table.running()]


@pytest.mark.behaviour("C6")
def test_c6_under_fcfs_the_last_to_arrive_is_preempted() -> None:
    world = SchedulerWorld(make_config(), num_blocks=12)
    for name in ("a", "b", "c"):
        world.add(make_request(name, 10, max_tokens=20))
    run_until_preempted(world)

    assert running(world) == ["a", "b"]
    world.run()
    for name in ("a", "b", "c"):
        world.check_output(name)


@pytest.mark.behaviour("C6")
def test_c6_under_priority_the_largest_priority_then_arrival_is_preempted() -> None:
    world = SchedulerWorld(make_config(policy="priority"), num_blocks=12)
    for name, priority, arrival_s in (("low", 5, 1.0), ("late", 1, 3.0), ("early", 1, 2.0)):
        world.add(make_request(name, 10, max_tokens=20, priority=priority, arrival_s=arrival_s))
    run_until_preempted(world)
    assert sorted(running(world)) == ["early", "late"]

    policy = PreemptionPolicy("priority")
    last = policy.last(world.scheduler._table.running())
    assert last is not None
    assert last.request_id == "late"


@pytest.mark.behaviour("C6")
def test_c6_a_preempted_request_gives_its_tokens_of_this_step_back() -> None:
    # "a" and "b" decode; "c" prefills in chunks. When "a" lacks a block, "c" goes, and its share of the step with it.
    world = SchedulerWorld(make_config(budget=8), num_blocks=13)
    world.add(make_request("a", 3, max_tokens=40))
    world.step()
    world.add(make_request("c", 40, max_tokens=2))
    seen = []
    while world.scheduler.stats().num_preemptions == 0 and world.scheduler.has_work():
        seen.append(world.step())

    assert int(seen[-1].num_tokens) == 1
    world.run()
    world.check_output("a")
    world.check_output("c")


@pytest.mark.behaviour("C6")
def test_c6_if_the_victim_is_the_request_itself_it_waits_with_its_blocks() -> None:
    # Six blocks: each starts with two and takes a third; in step 7 "b" lacks a fourth, and "a" ends.
    world = SchedulerWorld(make_config(), num_blocks=6)
    world.add(make_request("a", 6, max_tokens=7))
    world.add(make_request("b", 7, max_tokens=10))
    for _ in range(6):
        assert world.step().rows.size == 2
    held = world.scheduler._table.block_tables(1)

    output = world.step()

    assert output.rows.tolist() == [0]
    assert running(world) == ["b"]
    assert world.scheduler._table.block_tables(1) == held
    assert world.scheduler.stats().num_preemptions == 0
    world.run()
    world.check_output("b")


@pytest.mark.behaviour("C7")
@pytest.mark.known_failure(20)
def test_c7_a_preempted_request_resumes_first_and_from_its_cached_prefix() -> None:
    config = make_config(artificial_preemption_probability=1.0, max_num_artificial_preemptions=1)
    world = SchedulerWorld(config, num_blocks=16)
    world.add(make_request("a", 10, max_tokens=9))
    world.step()
    world.add(make_request("b", 4, max_tokens=9))
    assert world.step().rows.size == 0, "the only one that ran was preempted"

    resumed, other = world.step().new_rows

    assert (resumed.request_id, other.request_id) == ("a", "b")
    assert resumed.token_ids.tolist() == [*world.requests["a"].prompt_token_ids, *world.endings["a"].token_ids[:1]]
    stats = world.scheduler.stats()
    assert (stats.resumed_queried_tokens, stats.resumed_hit_tokens) == (11, 8)
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (14, 0), "resuming does not flatter the hit rate"
    world.run()
    world.check_output("a")


@pytest.mark.behaviour("C7")
def test_c7_preemptions_are_counted() -> None:
    world = SchedulerWorld(make_config(), num_blocks=12)
    for name in ("a", "b", "c"):
        world.add(make_request(name, 10, max_tokens=20))
    run_until_preempted(world)
    waiting = list(world.scheduler._live_requests.waiting)

    assert [request.num_preemptions for request in waiting] == [1]


def test_a_watermark_keeps_room_for_the_growth_of_what_runs() -> None:
    world = SchedulerWorld(make_config(watermark=0.3), num_blocks=10)
    world.add(make_request("a", 14, max_tokens=12))
    world.step()
    world.add(make_request("b", 12, max_tokens=2))

    world.step()

    assert running(world) == ["a"]
    world.run()
    assert world.scheduler.stats().num_preemptions == 0


def test_two_requests_that_together_need_more_than_the_pool_do_not_preempt_each_other_in_circles() -> None:
    world = SchedulerWorld(make_config(), num_blocks=8)
    world.add(make_request("a", 8, max_tokens=20))
    world.add(make_request("b", 8, max_tokens=20))
    world.run()

    world.check_output("a")
    world.check_output("b")
    assert world.scheduler.stats().num_preemptions <= 2


@pytest.mark.behaviour("O6")
def test_o6_artificial_preemption_costs_time_and_no_token() -> None:
    config = make_config(artificial_preemption_probability=0.5, max_num_artificial_preemptions=5)
    world = SchedulerWorld(config, num_blocks=32)
    for name in ("a", "b"):
        world.add(make_request(name, 10, max_tokens=20))
    world.run()

    assert world.scheduler.stats().num_preemptions == 5
    world.check_output("a")
    world.check_output("b")


@pytest.mark.behaviour("O6")
def test_o6_is_off_by_default() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32)

    assert not any(isinstance(part, ArtificialPreemption) for part in world.scheduler._preparations)
