"""KV for a peer: K7, known-failure 10."""

from __future__ import annotations

import pytest

from engine.contract.messages import FinishReason
from kv_transfer.connector import ConnectorEvents, LeaseEnd, LeaseEnded
from tests.support.router.decode_world import decode_world
from tests.support.scheduler.scheduler_requests import make_config, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld

# ---- K7


def prefilled(
    world: SchedulerWorld, prompt: int | tuple[int, ...] = 10, *, name: str = "a", max_tokens: int = 9
) -> str:
    """Hand a prompt over; returns the lease's id."""
    world.add(make_request(name, prompt, max_tokens=max_tokens, hand_over=True))
    world.run()
    last = world.endings[name].last
    assert last is not None
    assert last.kv_transfer is not None
    return last.kv_transfer.lease_id


@pytest.mark.behaviour("K7")
@pytest.mark.known_failure(10)
@pytest.mark.parametrize("num_tokens", [1, 4, 9, 16])
def test_k7_known_failure_10_the_lease_covers_the_prompt_and_nothing_else(num_tokens: int) -> None:
    world = decode_world()
    prefilled(world, num_tokens)

    last = world.endings["a"].last
    assert last is not None
    assert last.finish_reason is FinishReason.HANDED_OVER
    assert last.kv_transfer is not None
    assert last.kv_transfer.num_tokens == num_tokens
    (block_ids,) = last.kv_transfer.block_ids
    assert len(block_ids) == world.scheduler.stats().num_leased_blocks == -(-num_tokens // 4)
    assert len(last.token_ids) == 1


@pytest.mark.behaviour("K7")
@pytest.mark.parametrize("reason", list(LeaseEnd))
def test_k7_leased_blocks_are_freed_once_whatever_ends_the_lease(reason: LeaseEnd) -> None:
    world = decode_world()
    lease_id = prefilled(world)
    assert world.scheduler.stats().num_free_blocks == 29

    world.end_lease(lease_id, reason)
    assert world.scheduler.stats().num_free_blocks == 32
    world.handle(ConnectorEvents(leases=(LeaseEnded(request_id="a", lease_id=lease_id, reason=reason),)))

    assert world.scheduler.stats().num_free_blocks == 32
    assert world.scheduler.stats().num_unknown_ids == 1
    world.scheduler.check_integrity()


@pytest.mark.behaviour("K7")
def test_k7_a_block_that_two_leases_share_counts_once_until_both_ended() -> None:
    world = decode_world()
    leases = [prefilled(world, tuple(range(1, 11)), name=name) for name in ("a", "b")]
    stats = world.scheduler.stats()
    assert (stats.num_leased_blocks, stats.num_held_blocks) == (4, 0), "two shared full blocks, and one more each"

    world.end_lease(leases[0], LeaseEnd.DONE)
    stats = world.scheduler.stats()
    assert (stats.num_leased_blocks, stats.num_held_blocks) == (3, 0)
    world.end_lease(leases[1], LeaseEnd.DONE)
    assert world.scheduler.stats().num_leased_blocks == 0


@pytest.mark.behaviour("K7")
def test_k7_leased_blocks_outlive_pressure_and_admission_waits_for_them() -> None:
    world = decode_world(num_blocks=8)
    lease_id = prefilled(world, 20)
    world.add(make_request("b", 16, max_tokens=2))
    world.run()
    assert world.scheduler.stats().num_waiting == 1
    assert not world.scheduler.has_work()

    world.end_lease(lease_id)
    world.run()

    world.check_output("b")


@pytest.mark.behaviour("K7")
def test_k7_a_hand_over_of_a_preempted_prefill_covers_the_prompt() -> None:
    config = make_config(budget=8, artificial_preemption_probability=0.6, max_num_artificial_preemptions=4)
    world = SchedulerWorld(config, num_blocks=16)
    for index in range(3):
        world.add(make_request(f"r{index}", 17, hand_over=True))
    world.run()

    assert world.scheduler.stats().num_preemptions == 4
    for lease_id in list(world.connector.open_leases):
        world.end_lease(lease_id)
    assert world.scheduler.stats().num_free_blocks == 16


def prefilled_again(world: SchedulerWorld, name: str) -> str:
    """Hand the same request over again; returns the new lease's id."""
    world.add(make_request(name, world.requests[name].prompt_token_ids, hand_over=True))
    world.step()
    last = world.endings[name].last
    assert last is not None
    assert last.kv_transfer is not None
    return last.kv_transfer.lease_id


@pytest.mark.behaviour("K7")
def test_k7_the_same_id_may_come_again_while_its_old_lease_lasts() -> None:
    world = decode_world()
    old = prefilled(world)
    new = prefilled_again(world, "a")
    assert new != old

    world.end_lease(old)
    world.end_lease(new)

    assert world.scheduler.stats().num_free_blocks == 32


@pytest.mark.behaviour("K7")
def test_k7_the_older_of_two_leases_can_be_aborted_when_the_newer_one_ended() -> None:
    """The answer to the first prefill was lost, and a decode worker read what the second one made."""
    world = decode_world()
    prefilled(world)
    world.end_lease(prefilled_again(world, "a"))

    assert world.scheduler.abort("a")

    assert world.connector.aborted_leases == ["a"]
