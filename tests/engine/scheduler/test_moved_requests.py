"""Requests that come from another worker in the middle of their output (K1), and requests that are told to go there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.contract.messages import FinishReason
from tests.support.router.decode_world import decode_world
from tests.support.scheduler.scheduler_requests import fresh_prompt, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld, undisturbed_output


def add_moved(world: SchedulerWorld, name: str, prompt: tuple[int, ...], *, num_output_tokens: int) -> None:
    """A request that comes from another worker after so many output tokens, with the KV of all but the last one."""
    request = make_request(name, prompt, max_tokens=num_output_tokens + 3)
    output = tuple(undisturbed_output(request, world.max_total_tokens)[:num_output_tokens])
    offer = world.connector.offer(prompt + output[:-1])
    world.add(replace(request, output_token_ids=output, kv_transfer=offer))


def ended(world: SchedulerWorld) -> dict[str, FinishReason | None]:
    return {name: ending.last.finish_reason for name, ending in world.endings.items() if ending.last is not None}


@pytest.mark.behaviour("K1")
def test_k1_of_a_moved_request_only_prompt_tokens_count_as_cached_and_as_remote() -> None:
    world = decode_world()
    prompt = fresh_prompt(10)
    add_moved(world, "a", prompt, num_output_tokens=8)
    world.step()
    world.end_load("a")
    world.run()

    world.check_output("a")
    assert (world.endings["a"].num_cached_tokens, world.endings["a"].num_remote_tokens) == (10, 10)
    assert world.scheduler.stats().remote_hit_tokens == 17, "what was loaded, output included"


@pytest.mark.behaviour("K1")
def test_k1_of_a_moved_request_the_damaged_part_of_the_prompt_counts_as_neither() -> None:
    world = decode_world()
    prompt = fresh_prompt(10)
    world.add(make_request("earlier", prompt[:5], max_tokens=1))
    world.run()
    add_moved(world, "a", prompt, num_output_tokens=8)
    world.step()
    world.end_load("a", [0, 3])
    world.run()

    world.check_output("a")
    assert (world.endings["a"].num_cached_tokens, world.endings["a"].num_remote_tokens) == (6, 2)


def test_only_the_ones_that_were_told_to_leave() -> None:
    world = decode_world()
    for name in ("a", "b", "c"):
        world.add(make_request(name, fresh_prompt(5), max_tokens=9))
    world.step()

    world.order_out(["b", "nobody"])
    world.run()

    assert ended(world) == {"a": FinishReason.LENGTH, "b": FinishReason.HANDED_OVER, "c": FinishReason.LENGTH}
    assert world.scheduler.stats().num_moved_out == 1
    assert world.scheduler.stats().num_unknown_ids == 1


def test_of_those_that_wait_only_those_leave_that_have_not_begun_also_beside_a_step_in_flight() -> None:
    world = decode_world(seqs=1)
    for name in ("runs", "waits", "hands over", "stays"):
        world.add(make_request(name, fresh_prompt(5), max_tokens=9, hand_over=name == "hands over"))
    world.step()
    world.schedule()

    world.scheduler.order_out(["runs", "waits", "hands over", "nobody"], only_waiting=True)
    world.complete_step()
    assert ended(world) == dict.fromkeys(("waits", "hands over"), FinishReason.HANDED_OVER)
    assert {ending.last.kv_transfer for ending in world.endings.values() if ending.last is not None} == {None}
    world.run()

    assert ended(world)["runs"] is ended(world)["stays"] is FinishReason.LENGTH
    stats = world.scheduler.stats()
    assert (stats.num_moved_out, stats.num_unknown_ids, stats.recomputed_tokens) == (2, 1, 0)


def test_nobody_leaves_while_a_step_is_in_flight_and_its_token_goes_along() -> None:
    world = decode_world()
    world.add(make_request("a", fresh_prompt(5), max_tokens=9))
    world.step()
    world.schedule()

    world.order_out(["a"])
    assert world.is_live("a")
    world.complete_step()
    world.step()

    params = world.endings["a"].last.kv_transfer  # type: ignore[union-attr]
    assert len(world.endings["a"].token_ids) == 2
    assert params is not None
    assert params.num_tokens == 6, "the KV of all but the last token"
    world.end_lease(params.lease_id)
    world.scheduler.check_integrity()


def test_one_that_is_loading_leaves_when_it_runs_with_what_was_loaded() -> None:
    world = decode_world()
    prompt = fresh_prompt(10)
    add_moved(world, "a", prompt, num_output_tokens=1)
    world.step()

    world.order_out(["a"])
    world.step()
    assert world.is_live("a")
    world.end_load("a")
    world.run()

    last = world.endings["a"].last
    assert last is not None
    assert last.finish_reason is FinishReason.HANDED_OVER
    assert last.kv_transfer is not None
    assert last.kv_transfer.num_tokens >= 10
    world.check_output("a")


def test_one_that_waits_leaves_with_the_hand_over_that_it_brought() -> None:
    world = decode_world(seqs=1)
    world.add(make_request("first", fresh_prompt(5), max_tokens=9))
    world.step()
    add_moved(world, "a", fresh_prompt(10), num_output_tokens=1)

    world.order_out(["a"])

    last = world.endings["a"].last
    assert last is not None
    assert last.kv_transfer == world.requests["a"].kv_transfer
    world.run()


def test_one_that_hands_over_anyway_is_left_alone() -> None:
    world = decode_world()
    world.add(make_request("a", fresh_prompt(5), max_tokens=9, hand_over=True))

    world.order_out(["a"])
    world.run()

    assert len(world.endings["a"].token_ids) == 1
    assert world.scheduler.stats().num_moved_out == 0


def test_order_to_leave_ends_with_its_request_and_is_not_for_the_next_of_that_id() -> None:
    world = decode_world()
    add_moved(world, "a", fresh_prompt(10), num_output_tokens=1)
    world.step()
    world.order_out(["a"])
    world.abort("a")
    world.end_load("a")

    world.add(make_request("a", fresh_prompt(5), max_tokens=3))
    world.run()

    assert ended(world) == {"a": FinishReason.LENGTH}
