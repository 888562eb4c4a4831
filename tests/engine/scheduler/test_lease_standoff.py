"""Circular waits: elastic engines whose leases hold the blocks that each other's next requests need."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from engine.contract.messages import FinishReason, GenerateRequest
from engine.frontend.engine_core import EngineCore
from engine.scheduler.policy.lease_standoff import PATIENCE_S
from kv_transfer.connector import LeaseEnd
from kv_transfer.params import KVTransferParams
from tests.support.engine.chain_engine import chain_engine
from tests.support.engine.chain_runner import expected_tokens
from tests.support.engine.disaggregated import joined_cores
from tests.support.engine.requests import greedy_request
from tests.support.router.decode_world import add_handed_over, decode_world, first_token
from tests.support.scheduler.scheduler_requests import fresh_prompt, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld

NUM_BLOCKS = 8
POLL_PERIOD_S = 0.01


def standing_off(*, max_recomputed_tokens: int | None = None) -> tuple[SchedulerWorld, str]:
    """A lease holds 5 of 8 blocks, and ``a`` waits for 6 for what another engine keeps for it; the lease's id."""
    world = decode_world(num_blocks=NUM_BLOCKS)
    world.add(make_request("lent", fresh_prompt(20), max_tokens=9, hand_over=True))
    world.run()
    last = world.endings["lent"].last
    assert last is not None
    assert last.kv_transfer is not None
    prompt = fresh_prompt(20)
    offer = world.connector.offer(prompt)
    waiting = make_request("a", prompt, output=first_token(prompt), kv_transfer=offer, max_tokens=4)
    world.add(replace(waiting, max_recomputed_tokens=max_recomputed_tokens))
    world.run()
    assert world.scheduler.stats().num_waiting == 1
    return world, last.kv_transfer.lease_id


def wait(world: SchedulerWorld) -> None:
    """Let the time go by that an idle engine sleeps at most."""
    timeout_s = world.scheduler.idle_timeout_s()
    assert timeout_s is not None
    world.now_s += timeout_s
    assert world.scheduler.has_work()
    world.run()


@pytest.mark.known_failure(7)
def test_known_failure_7_who_waits_only_for_leases_does_without_what_others_keep_for_it() -> None:
    world, lease_id = standing_off()
    assert not world.connector.released
    assert not world.scheduler.is_stuck()
    assert world.scheduler.idle_timeout_s() == pytest.approx(PATIENCE_S)

    wait(world)
    assert len(world.connector.released) == 1, "the other engine has its blocks back, and can read what is lent here"
    world.end_lease(lease_id, LeaseEnd.DONE)
    world.run()

    world.check_output("a")
    assert world.endings["a"].num_remote_tokens == 0
    stats = world.scheduler.stats()
    assert (stats.num_standoffs, stats.recomputed_tokens) == (1, 20)
    assert world.scheduler.idle_timeout_s() is None
    world.scheduler.check_integrity()


@pytest.mark.known_failure(7)
def test_known_failure_7_whoever_is_not_to_be_computed_here_goes_back_to_its_sender() -> None:
    world, _ = standing_off(max_recomputed_tokens=0)

    wait(world)

    last = world.endings["a"].last
    assert last is not None
    assert last.error is not None
    assert (last.finish_reason, last.error.code) == (FinishReason.ERROR, "kv_lost")
    assert len(world.connector.released) == 1
    assert world.scheduler.idle_timeout_s() is None


def test_a_lease_that_ends_in_time_lets_the_request_load() -> None:
    world, lease_id = standing_off()
    world.now_s += 0.9 * PATIENCE_S
    world.run()

    world.end_lease(lease_id, LeaseEnd.DONE)
    world.run()
    world.end_load("a")
    world.run()

    world.check_output("a")
    assert not world.scheduler.stats().num_standoffs


def test_patience_begins_anew_when_something_ran() -> None:
    world, _ = standing_off()
    world.now_s += 0.9 * PATIENCE_S
    world.add(make_request("small", 4, max_tokens=2, priority=-1))
    world.run()
    assert world.endings["small"].last is None, "first come, first served"

    world.scheduler.abort("a")
    world.run()
    world.check_output("small")
    add_handed_over(world, "b", fresh_prompt(20), max_tokens=4)
    world.run()

    assert world.scheduler.idle_timeout_s() == pytest.approx(PATIENCE_S)


def test_one_request_a_time_does_without() -> None:
    world, _ = standing_off()
    add_handed_over(world, "b", fresh_prompt(20), max_tokens=4)
    world.run()

    wait(world)
    assert len(world.connector.released) == 1
    wait(world)
    assert len(world.connector.released) == 2
    world.run()

    assert world.scheduler.stats().num_standoffs == 2
    assert world.scheduler.idle_timeout_s() is None, "there is nothing left to do without"


def hand_over(core: EngineCore, request: GenerateRequest) -> tuple[KVTransferParams, tuple[int, ...]]:
    core.add_request(replace(request, hand_over=True))
    while core.has_unfinished():
        core.collect()
        for delta in core.step().deltas():
            if delta.finish_reason is FinishReason.HANDED_OVER:
                assert delta.kv_transfer is not None
                return delta.kv_transfer, delta.token_ids
    raise AssertionError("the prompt was not handed over")


@pytest.mark.known_failure(7)
def test_known_failure_7_two_engines_that_wait_for_each_other_go_on() -> None:
    """Each computed a prompt for the other one, and needs the blocks that it keeps for that."""

    def build(build_connector: object) -> EngineCore:
        return chain_engine(num_blocks=16, build_connector=build_connector)  # type: ignore[arg-type]

    requests = [
        greedy_request(name, list(range(first, first + 38)), max_tokens=8) for name, first in (("a", 5), ("b", 105))
    ]
    with joined_cores(build, build) as (left, right):
        lent = [hand_over(core, request) for core, request in zip((left, right), requests, strict=True)]
        outputs, deadline_s = {}, time.monotonic() + 10 * PATIENCE_S
        for core, request, (params, tokens) in zip((right, left), requests, lent, strict=True):
            core.add_request(replace(request, output_token_ids=tokens, kv_transfer=params))
            outputs[request.request_id] = list(tokens)
        while left.has_unfinished() or right.has_unfinished():
            has_moved = False
            for core in (left, right):
                core.wake.clear()
                core.collect()
                if core.has_work():
                    has_moved = True
                    for delta in core.step().deltas():
                        outputs[delta.request_id] += delta.token_ids
            if not has_moved:
                assert time.monotonic() < deadline_s, "both wait for ever"
                left.wake.wait(POLL_PERIOD_S)

        for request in requests:
            assert outputs[request.request_id] == expected_tokens(list(request.prompt_token_ids), 8)
        assert left.load_report().num_leased_blocks == right.load_report().num_leased_blocks == 0
