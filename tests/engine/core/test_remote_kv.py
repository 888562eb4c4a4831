"""KV from a peer and KV for a peer: K1-K4, K6, K7, and known-failures 3, 4, 6, 8, 10, 11, 17."""

from __future__ import annotations

import pytest

from engine.errors import DuplicateRequestError, PromptTooLongError, RequestRefusedError
from engine.messages import FinishReason
from kv_transfer.connector import ConnectorEvents, LeaseEnd, LeaseEnded, LoadEnded
from tests.support.scheduler_requests import fresh_prompt, make_config, make_request
from tests.support.scheduler_world import SchedulerWorld, kv_values, next_token


def decode_world(num_blocks: int = 32, **options: object) -> SchedulerWorld:
    """A decode worker's scheduler; blocks hold 4 tokens."""
    return SchedulerWorld(make_config(**options), num_blocks=num_blocks)  # type: ignore[arg-type]


def first_token(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """What the prefill worker sampled."""
    return (next_token(kv_values(prompt)[-1]),)


def add_handed_over(world: SchedulerWorld, name: str, prompt: tuple[int, ...], **options: object) -> None:
    """A request whose prompt was computed elsewhere, with the first token."""
    offer = world.connector.offer(prompt)
    world.add(make_request(name, prompt, output=first_token(prompt), kv_transfer=offer, **options))  # type: ignore[arg-type]


def load_ended(request_id: str) -> ConnectorEvents:
    """The event that a load ended well."""
    return ConnectorEvents(loads=(LoadEnded(request_id=request_id, failed_block_ids=(), num_bytes=0, duration_s=0.0),))


# ---- K1


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


def test_k3_loaded_blocks_are_published_once_confirmed() -> None:
    world = decode_world()
    prompt = fresh_prompt(12)
    add_handed_over(world, "a", prompt)
    world.step()
    world.end_load("a")

    world.add(make_request("same prompt", prompt, max_tokens=2))
    output = world.step()

    assert output.first_positions.tolist() == [12, 8]


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


# ---- K4


def test_k4_exactly_the_damaged_blocks_are_recomputed() -> None:
    world = decode_world()
    add_handed_over(world, "a", fresh_prompt(24), max_tokens=3)
    world.step()
    world.end_load("a", [1, 2, 4])

    steps = [world.step() for _ in range(3)]

    ranges = [(int(step.first_positions[0]), int(step.num_scheduled_tokens[0])) for step in steps]
    assert ranges == [(4, 8), (16, 4), (24, 1)]
    assert [bool(step.is_sampling[0]) for step in steps] == [False, False, True]
    world.run()
    world.check_output("a")
    stats = world.scheduler.stats()
    assert (stats.failed_blocks, stats.recomputed_tokens, stats.remote_hit_tokens) == (3, 12, 12)
    assert world.endings["a"].num_remote_tokens == 12


def test_k4_the_fallback_recomputes_from_the_first_damaged_block_on() -> None:
    world = decode_world(recompute_damaged_only=False)
    add_handed_over(world, "a", fresh_prompt(24), max_tokens=3)
    world.step()
    world.end_load("a", [1, 4])

    output = world.step()

    assert (output.first_positions.tolist(), output.num_scheduled_tokens.tolist()) == ([4], [21])
    world.run()
    world.check_output("a")


def test_k4_damage_at_the_end_joins_what_is_computed_anyway() -> None:
    world = decode_world()
    add_handed_over(world, "a", fresh_prompt(22), max_tokens=3)
    world.step()
    world.end_load("a", [4, 5])

    output = world.step()

    assert (output.first_positions.tolist(), output.num_scheduled_tokens.tolist()) == ([16], [7])
    world.run()
    world.check_output("a")


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
    from engine.core.request import Request

    probe = Request(make_request("probe", prompt), sequence=0, full_limit=0, queued_at_s=0.0)
    return [world.scheduler._kv_cache.is_published(block_hash) for block_hash in probe.hashes(world.block_size)]


def test_k4_holes_larger_than_the_budget_are_filled_in_chunks() -> None:
    world = decode_world(budget=6)
    add_handed_over(world, "a", fresh_prompt(24), max_tokens=3)
    world.step()
    world.end_load("a", [0, 1, 2, 4])
    world.run()

    world.check_output("a")
    assert world.runner.num_computed_positions == 16 + 2


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


def test_k4_damaged_blocks_that_several_requests_share_are_recomputed_once() -> None:
    world = decode_world(seqs=4)
    prompt = fresh_prompt(24)
    for index in range(3):
        add_handed_over(world, f"r{index}", prompt, max_tokens=2)
    world.step()
    for index in range(3):
        world.end_load(f"r{index}", [1, 3])
    world.run()

    for index in range(3):
        world.check_output(f"r{index}")
    assert world.runner.num_computed_positions == 8 + 3, "each hole once, then one step each"
    assert world.scheduler.stats().num_adopted_blocks == 4


def test_k4_a_block_that_one_request_loaded_well_repairs_the_others() -> None:
    world = decode_world(seqs=4)
    prompt = fresh_prompt(16)
    for name in ("damaged", "well"):
        add_handed_over(world, name, prompt, max_tokens=2)
    world.step()
    world.end_load("damaged", [0, 1, 2, 3])
    world.end_load("well")
    world.run()

    world.check_output("damaged")
    assert world.runner.num_computed_positions == 2


def test_k4_known_failure_11_damaged_blocks_are_never_published() -> None:
    world = decode_world()
    prompt = fresh_prompt(16)
    add_handed_over(world, "a", prompt)
    world.step()
    world.end_load("a", [0, 1, 2, 3])
    world.abort("a")

    world.add(make_request("same prompt", prompt, max_tokens=2))

    assert world.step().first_positions.tolist() == [0]


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


# ---- K6


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


def test_k6_policy_fail_does_not_mind_loads_that_succeed() -> None:
    world = decode_world(load_failure_policy="fail")
    add_handed_over(world, "a", fresh_prompt(12), max_tokens=3)
    world.step()
    world.end_load("a")
    world.run()

    world.check_output("a")


# ---- K7


def prefilled(world: SchedulerWorld, num_tokens: int = 10, *, name: str = "a", max_tokens: int = 9) -> str:
    """Hand a prompt over; returns the lease's id."""
    world.add(make_request(name, num_tokens, max_tokens=max_tokens, hand_over=True))
    world.run()
    last = world.endings[name].last
    assert last is not None
    assert last.kv_transfer is not None
    return last.kv_transfer.lease_id


@pytest.mark.parametrize("num_tokens", [1, 4, 9, 16])
def test_k7_known_failure_10_the_lease_covers_the_prompt_and_nothing_else(num_tokens: int) -> None:
    world = decode_world()
    prefilled(world, num_tokens)

    last = world.endings["a"].last
    assert last is not None
    assert last.finish_reason is FinishReason.HANDED_OVER
    assert last.kv_transfer is not None
    assert last.kv_transfer.num_tokens == num_tokens
    assert len(last.kv_transfer.block_ids) == world.scheduler.stats().num_leased_blocks == -(-num_tokens // 4)
    assert len(last.token_ids) == 1


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


def test_k7_the_same_id_may_come_again_while_its_old_lease_lasts() -> None:
    world = decode_world()
    old = prefilled(world)
    world.scheduler.add_request(make_request("a", world.requests["a"].prompt_token_ids, hand_over=True))
    output = world.scheduler.schedule()
    result = world.scheduler.update(output, world.runner.execute(output))
    new = result.deltas_by_client()[""][0].kv_transfer
    assert new is not None
    assert new.lease_id != old

    world.end_lease(old)
    world.end_lease(new.lease_id)

    assert world.scheduler.stats().num_free_blocks == 32


# ---- who goes before a load began, or while it lasts


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
