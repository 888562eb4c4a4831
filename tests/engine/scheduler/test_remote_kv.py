"""KV from a peer: K1-K3, and what happens to a hand-over whose request goes: known failures 3-8, 17."""

from __future__ import annotations

import pytest

from engine.contract.errors import DuplicateRequestError, PromptTooLongError, RequestRefusedError
from engine.contract.messages import FinishReason
from kv_transfer.connector import ConnectorEvents, LeaseEnd, LeaseEnded, LoadEnded
from tests.support.router.decode_world import add_handed_over, decode_world, first_token
from tests.support.scheduler.scheduler_requests import fresh_prompt, make_config, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld


def load_ended(request_id: str) -> ConnectorEvents:
    """The event that a load ended well."""
    return ConnectorEvents(loads=(LoadEnded(request_id=request_id, failed_block_ids=(), num_bytes=0, duration_s=0.0),))


def test_request_that_waits_for_its_load_is_not_stuck() -> None:
    world = decode_world()
    add_handed_over(world, "a", fresh_prompt(16))
    world.step()
    world.run()

    assert world.scheduler.has_unfinished()
    assert not world.scheduler.is_stuck()


# ---- K1


@pytest.mark.behaviour("K1")
def test_k1_what_is_not_known_yet_is_passed_over_and_asked_again() -> None:
    world = decode_world()
    prompt = fresh_prompt(10)
    offer = world.connector.offer(prompt, is_known=False)
    world.add(make_request("asked", prompt, kv_transfer=offer))
    world.add(make_request("behind", 6, max_tokens=2))
    world.run()
    world.check_output("behind")
    assert (world.connector.num_matches, world.scheduler.stats().num_waiting) == (1, 1)
    assert world.scheduler.idle_timeout_s() == world.config.ask_again_s

    world.connector.undecided.clear()
    assert not world.scheduler.has_work(), "not due yet"
    world.now_s += world.config.ask_again_s
    assert world.scheduler.has_work()
    world.run()

    assert list(world.connector.open_loads) == ["asked"]


@pytest.mark.behaviour("K1")
def test_k1_only_what_is_not_held_locally_is_loaded() -> None:
    world = decode_world()
    prompt = fresh_prompt(16)
    world.add(make_request("earlier", prompt[:9], max_tokens=1))
    world.run()

    add_handed_over(world, "a", prompt)
    world.step()

    load = world.connector.open_loads["a"]
    assert (load.first_block, len(load.block_ids)) == (2, 2)
    world.end_load("a")
    world.run()
    world.check_output("a")
    assert (world.endings["a"].num_cached_tokens, world.endings["a"].num_remote_tokens) == (16, 8)


@pytest.mark.behaviour("K1")
def test_k1_a_prompt_that_is_here_already_releases_the_peers_lease() -> None:
    world = decode_world()
    prompt = fresh_prompt(16)
    world.add(make_request("earlier", (*prompt, 7), max_tokens=1))
    world.run()

    add_handed_over(world, "a", prompt, max_tokens=4)
    world.run()

    assert len(world.connector.released) == 1
    world.check_output("a")
    assert (world.endings["a"].num_cached_tokens, world.endings["a"].num_remote_tokens) == (16, 0)


# ---- K2


@pytest.mark.behaviour("K2")
def test_k2_a_loading_request_is_out_of_the_way_and_costs_nothing_per_step() -> None:
    world = decode_world(seqs=2)
    for index in range(3):
        add_handed_over(world, f"loading {index}", fresh_prompt(8))
    world.add(make_request("a", 6))
    world.add(make_request("b", 6))

    world.step()
    num_matches = world.connector.num_matches
    outputs = [world.step() for _ in range(5)]

    assert world.scheduler.stats().num_loading == 3
    assert [output.rows.size for output in outputs] == [2] * 5, "loads take no row and no budget"
    assert world.connector.num_matches == num_matches


@pytest.mark.behaviour("K2", "B3")
def test_k2_b3_blocks_being_loaded_are_not_offered_to_others() -> None:
    world = decode_world()
    prompt = fresh_prompt(12)
    add_handed_over(world, "a", prompt)
    world.step()

    world.add(make_request("same prompt", prompt, max_tokens=2))
    output = world.step()

    assert output.first_positions.tolist() == [0]
    world.end_load("a")
    world.run()
    world.check_output("a")
    world.check_output("same prompt")


# ---- K3


@pytest.mark.behaviour("K3")
@pytest.mark.known_failure(17)
def test_k3_known_failure_17_decoding_starts_behind_the_first_token() -> None:
    world = decode_world()
    prompt = fresh_prompt(10)
    add_handed_over(world, "a", prompt, max_tokens=3)
    world.step()
    world.end_load("a")

    output = world.step()

    assert (output.first_positions.tolist(), output.num_scheduled_tokens.tolist()) == ([10], [1])
    world.run()
    world.check_output("a")
    assert (world.endings["a"].num_cached_tokens, world.endings["a"].num_remote_tokens) == (10, 10)


@pytest.mark.behaviour("K3")
@pytest.mark.parametrize("num_tokens", [3, 8, 9])
def test_k3_the_last_token_is_computed_when_its_successor_is_not_known(num_tokens: int) -> None:
    world = decode_world()
    prompt = fresh_prompt(num_tokens)
    world.add(make_request("a", prompt, max_tokens=3, kv_transfer=world.connector.offer(prompt)))
    world.step()
    world.end_load("a")

    output = world.step()

    assert (output.first_positions.tolist(), output.num_scheduled_tokens.tolist()) == ([num_tokens - 1], [1])
    world.run()
    world.check_output("a")


@pytest.mark.behaviour("K3")
def test_k3_loaded_blocks_are_published_once_confirmed() -> None:
    world = decode_world()
    prompt = fresh_prompt(12)
    add_handed_over(world, "a", prompt)
    world.step()
    world.end_load("a")

    world.add(make_request("same prompt", prompt, max_tokens=2))
    output = world.step()

    assert output.first_positions.tolist() == [12, 8]


@pytest.mark.behaviour("K3")
@pytest.mark.known_failure(8)
def test_k3_known_failure_8_the_end_of_a_load_wakes_an_idle_engine() -> None:
    for failed in ([], [0], [0, 1, 2]):
        world = decode_world()
        add_handed_over(world, "only one", fresh_prompt(12), max_tokens=3)
        world.run()
        assert not world.scheduler.has_work()

        world.end_load("only one", failed)

        assert world.scheduler.has_work()
        world.run()
        world.check_output("only one")


# ---- who goes before a load began, or while it lasts


@pytest.mark.known_failure(3)
def test_known_failure_3_a_refused_request_releases_the_peers_lease() -> None:
    world = decode_world(seqs=1, max_num_waiting=1)
    offers = [world.connector.offer(fresh_prompt(num_tokens)) for num_tokens in (200, 8, 8, 8)]
    with pytest.raises(PromptTooLongError):
        world.add(make_request("long", 200, kv_transfer=offers[0]))
    world.add(make_request("waits", 8, kv_transfer=offers[1]))
    with pytest.raises(RequestRefusedError, match="1 requests are waiting"):
        world.add(make_request("too many", 8, kv_transfer=offers[2]))
    with pytest.raises(DuplicateRequestError):
        world.scheduler.add_request(make_request("waits", 8, kv_transfer=offers[3]))
    with pytest.raises(DuplicateRequestError):
        world.scheduler.add_request(make_request("waits", 8, kv_transfer=offers[1]))

    assert world.connector.released == [offer.lease_id for offer in (offers[0], offers[2], offers[3])]


def test_a_request_that_ends_before_its_load_began_releases_the_peers_lease() -> None:
    world = decode_world()
    add_handed_over(world, "a", fresh_prompt(8))

    world.abort("a")

    assert len(world.connector.released) == 1
    assert not world.scheduler.schedule().connector_orders.is_empty


def test_a_waiting_request_that_is_moved_passes_its_hand_over_on() -> None:
    """Nobody here will read it: its lease is neither ended nor renewed from here any more."""
    world = decode_world(seqs=1)
    world.add(make_request("runs", 8))
    world.step()
    add_handed_over(world, "waits", fresh_prompt(8))

    assert world.scheduler.move_out() == 2

    world.run()
    ending = world.endings["waits"].last
    assert ending is not None
    assert ending.finish_reason is FinishReason.HANDED_OVER
    assert ending.kv_transfer is not None
    assert world.connector.passed_on == [ending.kv_transfer.lease_id]
    assert world.connector.released == []


@pytest.mark.known_failure(4)
def test_known_failure_4_the_destination_of_an_aborted_load_stays_held_until_it_ended() -> None:
    world = decode_world(num_blocks=8)
    add_handed_over(world, "a", fresh_prompt(20))
    world.step()
    world.abort("a")
    world.add(make_request("b", 16, max_tokens=3))

    world.run()
    assert world.connector.cancelled == ["a"]
    assert world.scheduler.stats().num_running == 0, "the blocks are not free yet"
    assert world.scheduler.stats().num_loading == 0

    world.end_load("a")
    world.run()

    world.check_output("b")
    assert world.scheduler.stats().num_free_blocks == 8


@pytest.mark.known_failure(6)
def test_known_failure_6_late_and_duplicate_events_are_counted_and_ignored() -> None:
    world = decode_world()
    add_handed_over(world, "a", fresh_prompt(8), max_tokens=2)
    world.step()
    world.end_load("a")
    world.handle(load_ended("a"))
    world.run()
    world.handle(load_ended("a"))
    world.handle(load_ended("never heard of"))
    lease = LeaseEnded(request_id="a", lease_id="?", reason=LeaseEnd.EXPIRED)
    world.handle(ConnectorEvents(leases=(lease,)))

    assert world.scheduler.stats().num_unknown_ids == 4
    world.check_output("a")


def test_an_id_that_comes_again_while_its_abandoned_load_lasts_is_computed_here() -> None:
    world = decode_world()
    prompt = fresh_prompt(8)
    add_handed_over(world, "a", prompt)
    world.step()
    world.abort("a")
    world.scheduler.add_request(
        make_request("a", prompt, output=first_token(prompt), kv_transfer=world.connector.offer(prompt))
    )

    output = world.scheduler.schedule()
    world.scheduler.update(output, world.runner.execute(output))

    assert output.first_positions.tolist() == [0]
    assert len(world.connector.released) == 1
    world.end_load("a")
    world.scheduler.check_integrity()


@pytest.mark.known_failure(7)
def test_known_failure_7_two_loads_that_together_need_more_than_the_pool() -> None:
    world = decode_world(num_blocks=8)
    for name in ("a", "b"):
        add_handed_over(world, name, fresh_prompt(20), max_tokens=6)
    world.run()
    assert list(world.connector.open_loads) == ["a"], "the second waits until its whole destination is free"

    world.end_load("a")
    world.run()
    world.end_load("b")
    world.run()

    world.check_output("a")
    world.check_output("b")


@pytest.mark.known_failure(7)
def test_known_failure_7_what_was_loaded_gives_way_when_it_blocks_the_only_one_that_runs() -> None:
    # One row. "b" is loaded and waits for the row; "a" runs and needs the blocks that "b" holds.
    world = decode_world(num_blocks=10, seqs=1)
    add_handed_over(world, "b", fresh_prompt(16), max_tokens=2)
    world.step()
    world.add(make_request("a", 9, max_tokens=25))
    world.step()
    assert world.scheduler.stats().num_running == 1
    world.end_load("b")
    world.run()

    world.check_output("a")
    world.check_output("b")


@pytest.mark.known_failure(5)
def test_known_failure_5_a_stalled_load_is_computed_here_and_its_destination_stays_held() -> None:
    world = decode_world(num_blocks=16)
    add_handed_over(world, "a", fresh_prompt(20), max_tokens=4)
    world.run()

    world.stall_load("a")
    assert world.scheduler.has_work()
    world.run()

    world.check_output("a")
    assert world.endings["a"].num_remote_tokens == 0
    assert world.scheduler.stats().num_free_blocks == 10, "the load may still write six blocks"
    world.stall_load("a")
    world.end_load("a")
    assert world.scheduler.stats().num_free_blocks == 16
    assert world.scheduler.stats().num_unknown_ids == 1


@pytest.mark.behaviour("K6")
def test_k6_policy_fail_holds_for_stalled_loads_too() -> None:
    world = decode_world(load_failure_policy="fail")
    add_handed_over(world, "a", fresh_prompt(12))
    world.step()

    world.stall_load("a")

    last = world.endings["a"].last
    assert last is not None
    assert last.error is not None
    assert "ran out of time" in last.error.message
    world.end_load("a")
    assert world.scheduler.stats().num_free_blocks == 32


def test_a_request_without_a_connector_is_refused() -> None:
    world = SchedulerWorld(make_config(), num_blocks=8, has_connector=False)
    for options in ({"hand_over": True}, {"kv_transfer": world.connector.offer((1, 2))}):
        with pytest.raises(RequestRefusedError, match="no KV connector") as refusal:
            world.add(make_request("a", (1, 2), **options))  # type: ignore[arg-type]
        assert refusal.value.code == "no_connector"
