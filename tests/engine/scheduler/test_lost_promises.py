"""Prompts that cannot keep their promise any more let others pass that can."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.config import QueuePolicy
from engine.contract.promise import NO_PROMISE, Promise
from engine.contract.step_time import StepTimeModel
from engine.scheduler.policy.step_timer import work_of
from engine.scheduler.requests.request import Request
from engine.scheduler.requests.request_queue import MAX_DEFERRED_PASSED, DeferringQueue
from tests.support.scheduler.fixed_step_time import know_step_times
from tests.support.scheduler.scheduler_requests import make_config, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld

MODEL = StepTimeModel(base_s=0.0, prompt_token_s=0.001, error=0.0, num_steps=1)
SOON = Promise(ttft_ms=250.0)
LENGTH = 100


def make_world(**options: object) -> SchedulerWorld:
    """One prompt of ``LENGTH`` tokens is computed at a time, in 0.1 seconds."""
    config = make_config(seqs=1, budget=LENGTH, **options)
    world = SchedulerWorld(config, num_blocks=400, block_size=4, max_model_len=200)
    know_step_times(world.scheduler, MODEL)
    return world


def served(world: SchedulerWorld) -> list[str]:
    """All requests in the order in which they end, while steps take what is predicted."""
    order: list[str] = []
    while world.live_ids():
        world.schedule()
        world.now_s += MODEL.seconds(work_of(world.scheduler._in_flight[-1].batch))
        while world.in_flight:
            world.complete_step()
        order += [name for name, end in world.endings.items() if not world.is_live(name) and name not in order]
    return order


def add(world: SchedulerWorld, name: str, promise: Promise, *, priority: int = 0) -> None:
    """A prompt that needs 0.1 s, and one token behind it."""
    world.add(make_request(name, LENGTH, max_tokens=1, promise=promise, priority=priority))


def lost_requests(world: SchedulerWorld, names: str) -> None:
    """Requests that came 0.2 s ago, so that too little is left for any of them."""
    for name in names:
        add(world, name, SOON)
    world.now_s += 0.2


@pytest.mark.behaviour("P3")
def test_p3_who_comes_later_passes_those_whose_promise_is_lost() -> None:
    world = make_world()
    lost_requests(world, "abc")
    add(world, "d", SOON)

    assert served(world) == ["d", "a", "b", "c"]


@pytest.mark.behaviour("P3")
def test_p3_while_promises_can_be_kept_nobody_passes() -> None:
    world = make_world()
    for name in "ab":
        add(world, name, SOON)

    assert served(world) == ["a", "b"]
    assert world.now_s == pytest.approx(0.2)


@pytest.mark.behaviour("P3")
def test_p3_under_twice_the_load_that_can_be_served_every_second_promise_is_kept() -> None:
    """In the order of arrival three would be in time: each one is later than the one before it."""
    world, ends = make_world(), dict[str, float]()
    arrivals = [(index * 0.05, f"r{index:02}") for index in range(40)]
    while arrivals or world.live_ids():
        while arrivals and arrivals[0][0] <= world.now_s + 1e-9:
            add(world, arrivals.pop(0)[1], SOON)
        world.schedule()
        world.now_s += MODEL.seconds(work_of(world.scheduler._in_flight[-1].batch))
        while world.in_flight:
            world.complete_step()
        ends |= {name: world.now_s for name in world.endings if not world.is_live(name) and name not in ends}

    num_kept = sum(end_s <= int(name[1:]) * 0.05 + 0.25 + 1e-9 for name, end_s in ends.items())

    assert len(ends) == 40
    assert num_kept >= 18


@pytest.mark.behaviour("P3")
def test_p3_a_request_that_was_promised_nothing_keeps_its_place() -> None:
    world = make_world()
    add(world, "plain", NO_PROMISE)
    lost_requests(world, "ab")
    add(world, "c", SOON)

    assert served(world) == ["plain", "c", "a", "b"]


@pytest.mark.behaviour("P3")
def test_p3_a_prompt_that_is_cached_is_not_lost() -> None:
    world, prompt = make_world(), tuple(range(1, LENGTH + 1))
    world.add(make_request("first", prompt, max_tokens=1))
    assert served(world) == ["first"]

    world.add(make_request("same", prompt, max_tokens=1, promise=Promise(ttft_ms=50.0)))
    add(world, "new", SOON)

    assert served(world)[-2:] == ["same", "new"]


@pytest.mark.behaviour("P3")
def test_p3_priorities_come_before_promises() -> None:
    world = make_world(policy="priority")
    for name in "ab":
        add(world, name, SOON, priority=-1)
    world.now_s += 0.2
    add(world, "c", SOON, priority=0)
    add(world, "d", SOON, priority=-1)

    assert served(world) == ["d", "a", "b", "c"]


@pytest.mark.behaviour("P3")
def test_p3_what_others_pass_is_told_until_it_is_served_or_leaves() -> None:
    world = make_world()
    lost_requests(world, "abc")
    add(world, "d", SOON)
    world.step()
    told = [world.scheduler.stats().deferred_prefill_tokens]
    world.abort("b")
    told.append(world.scheduler.stats().deferred_prefill_tokens)
    world.run()
    told.append(world.scheduler.stats().deferred_prefill_tokens)

    assert told == [3 * LENGTH, 2 * LENGTH, 0]


def queued(sequence: int, *, priority: int) -> Request:
    """A request as the queue sees it."""
    message = make_request(f"r{sequence}", (1,), priority=priority)
    return Request(message, arrival_index=sequence, full_limit=9, queued_at_s=0.0)


@pytest.mark.behaviour("P3")
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@given(steps=st.lists(st.tuples(st.sampled_from(["push", "defer", "pop", "look"]), st.integers(0, 1)), max_size=150))
@settings(derandomize=True, deadline=None, max_examples=150)
def test_p3_deferred_requests_keep_their_order_and_are_passed_by_so_many_of_their_priority(
    policy: QueuePolicy, steps: list[tuple[str, int]]
) -> None:
    queue = DeferringQueue(policy)
    in_time, deferred = list[Request](), list[Request]()
    passed: dict[str, int] = {}

    def rank(request: Request) -> int:
        return request.message.priority if policy == "priority" else 0

    for sequence, (step, value) in enumerate(steps):
        first = queue.peek()
        if step == "push":
            queue.push(request := queued(sequence, priority=value))
            in_time.append(request)
        elif step == "defer" and (request := queue.peek_in_time()) is not None:
            queue.defer(request)
            in_time.remove(request)
            deferred.append(request)
        elif step == "look" and first is not None:  # it may not start yet
            queue.remove(first)
            queue.push_front(first)
            assert queue.peek() is first
        elif step == "pop" and first is not None:
            assert queue.pop() is first
            lane = in_time if first in in_time else deferred
            alike = [item for item in lane if rank(item) == rank(first)]
            assert first is alike[0], "of one priority each lane keeps its order"
            if lane is in_time:
                assert all(rank(item) >= rank(first) for item in deferred), "nobody passes a higher priority"
                if policy == "fcfs" and deferred:
                    passed[deferred[0].request_id] = passed.get(deferred[0].request_id, 0) + 1
            lane.remove(first)
        assert set(queue) == {*in_time, *deferred}
        assert len(queue) == len(in_time) + len(deferred)
        assert queue.num_deferred_tokens == len(deferred)
    assert all(number <= MAX_DEFERRED_PASSED for number in passed.values())


@pytest.mark.behaviour("P3")
def test_p3_deferred_requests_are_served_under_any_load() -> None:
    queue = DeferringQueue("fcfs")
    for index in range(2):
        queue.push(queued(index, priority=0))
    for _ in range(2):
        request = queue.peek_in_time()
        assert request is not None
        queue.defer(request)
    for index in range(2, 4 * MAX_DEFERRED_PASSED):
        queue.push(queued(index, priority=0))

    order = [queue.pop().is_deferred for _ in range(2 * MAX_DEFERRED_PASSED + 2)]

    assert [place for place, was_deferred in enumerate(order) if was_deferred] == [
        MAX_DEFERRED_PASSED,
        2 * MAX_DEFERRED_PASSED + 1,
    ]


@pytest.mark.behaviour("P3")
def test_p3_who_was_preempted_is_served_first_though_its_promise_was_lost() -> None:
    queue = DeferringQueue("fcfs")
    lost, other = queued(0, priority=0), queued(1, priority=0)
    queue.push(lost)
    queue.defer(lost)
    queue.push(other)
    queue.remove(lost)
    lost.num_preemptions = 1
    queue.push_front(lost)

    assert [queue.pop(), queue.pop()] == [lost, other]


@pytest.mark.behaviour("P3")
def test_p3_a_preempted_prompt_keeps_its_place_though_its_promise_is_lost() -> None:
    world = make_world()
    add(world, "a", SOON)
    request = world.scheduler._live_requests.live["a"]
    request.num_preemptions = 1
    world.now_s += 0.3
    add(world, "b", SOON)

    assert served(world) == ["a", "b"]
