"""Abort in every state, and what the worker learns: C10, C14."""

from __future__ import annotations

import pytest

from engine.contract.messages import FinishReason
from tests.support.scheduler.scheduler_requests import fresh_prompt, make_config, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld


def small_world(num_blocks: int = 16, seqs: int = 2) -> SchedulerWorld:
    """A world whose pool is soon full."""
    return SchedulerWorld(make_config(seqs=seqs), num_blocks=num_blocks)


def assert_aborted(world: SchedulerWorld, name: str) -> None:
    """The request ended as aborted, once."""
    last = world.endings[name].last
    assert last is not None
    assert last.finish_reason is FinishReason.ABORT
    assert not world.abort(name), "its second abort is ignored"
    world.scheduler.check_integrity()


@pytest.mark.behaviour("C10")
def test_c10_while_waiting() -> None:
    world = small_world(seqs=1)
    world.add(make_request("a", 4))
    world.add(make_request("b", 4))
    world.step()

    assert world.abort("b")

    assert_aborted(world, "b")
    assert world.scheduler.stats().queued_prefill_tokens == 0


@pytest.mark.behaviour("C10")
def test_c10_while_running() -> None:
    world = small_world()
    world.add(make_request("a", 9))
    world.step()

    world.abort("a")

    assert_aborted(world, "a")
    assert world.scheduler.stats().num_free_blocks == 16
    assert world.step().released_rows.tolist() == [0]


@pytest.mark.behaviour("C10")
@pytest.mark.known_failure(22)
def test_c10_while_a_step_with_it_is_in_flight() -> None:
    world = small_world()
    world.add(make_request("a", 9))
    world.schedule()

    world.abort("a")
    assert world.scheduler.stats().num_free_blocks == 13, "the step may still write its blocks"
    world.complete_step()

    assert_aborted(world, "a")
    assert world.endings["a"].token_ids == []
    assert world.scheduler.stats().num_free_blocks == 16


@pytest.mark.behaviour("C10")
def test_c10_while_preempted() -> None:
    world = small_world(num_blocks=8)
    for name in ("a", "b"):
        world.add(make_request(name, 9, max_tokens=20))
    while world.scheduler.stats().num_preemptions == 0:
        world.step()

    world.abort("b")

    assert_aborted(world, "b")
    world.run()
    world.check_output("a")


@pytest.mark.behaviour("C10")
def test_c10_while_loading_and_when_loaded() -> None:
    world = small_world(seqs=1)
    for name in ("a", "b"):
        prompt = fresh_prompt(12)
        world.add(make_request(name, prompt, output=(1,), kv_transfer=world.connector.offer(prompt)))
    world.step()
    world.end_load("a")

    world.abort("a")
    world.abort("b")

    assert_aborted(world, "a")
    assert_aborted(world, "b")
    assert world.scheduler.stats().num_free_blocks == 12, "the load of b has not ended"
    world.end_load("b")
    assert world.scheduler.stats().num_free_blocks == 16


@pytest.mark.behaviour("C10")
def test_c10_while_the_connector_does_not_know_yet() -> None:
    world = small_world()
    prompt = fresh_prompt(12)
    world.add(make_request("a", prompt, kv_transfer=world.connector.offer(prompt, is_known=False)))
    world.run()

    world.abort("a")

    assert_aborted(world, "a")
    assert len(world.connector.released) == 1
    assert world.scheduler.idle_timeout_s() is None


@pytest.mark.behaviour("C10")
def test_c10_finished_but_pinned() -> None:
    world = small_world()
    world.add(make_request("a", 9, hand_over=True))
    world.run()

    assert world.abort("a")

    assert world.connector.aborted_leases == ["a"]
    assert world.scheduler.stats().num_leased_blocks == 3, "until the lease ended"
    assert world.scheduler.has_work(), "the order must reach the connector"
    world.end_lease(next(iter(world.connector.open_leases)))
    assert world.scheduler.stats().num_free_blocks == 16
    assert not world.abort("a")


@pytest.mark.behaviour("C10")
def test_c10_an_unknown_id_is_ignored_and_counted() -> None:
    world = small_world()

    assert not world.abort("nobody")

    assert world.scheduler.stats().num_unknown_ids == 1


@pytest.mark.behaviour("C14")
def test_c14_ids_of_finished_requests_reach_the_worker_exactly_once() -> None:
    world = small_world()
    world.add(make_request("ends", 4, max_tokens=1))
    world.add(make_request("aborted", 4))
    world.add(make_request("aborted while waiting", 4))
    world.step()
    world.abort("aborted")
    world.abort("aborted while waiting")

    outputs = [world.schedule() for _ in range(3)]

    assert sorted(outputs[0].finished_request_ids) == ["aborted", "aborted while waiting", "ends"]
    assert [output.finished_request_ids for output in outputs[1:]] == [(), ()]


@pytest.mark.behaviour("C14")
def test_c14_an_idle_engine_is_woken_to_tell_the_worker() -> None:
    world = small_world()
    world.add(make_request("a", 4, max_tokens=1))
    world.step()

    assert world.scheduler.has_work()
    output = world.step()

    assert (output.finished_request_ids, output.released_rows.tolist()) == (("a",), [0])
    assert not world.scheduler.has_work()
