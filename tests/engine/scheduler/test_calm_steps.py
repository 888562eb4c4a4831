"""Prompts with time to spare leave the streams beside them shorter gaps than were promised."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.role import DECODE
from engine.contract.promise import Promise
from engine.contract.step_time import calm_room_s
from engine.scheduler.policy.prompt_budget import LOOKED_AT
from prefill.role import PREFILL
from tests.support.scheduler.promised_gaps import BLOCK_SIZE, LONG, add_decoding, make_world, run_step
from tests.support.scheduler.scheduler_requests import make_request

GAP = Promise(itl_ms=31.5)
HURRIED = 20
"""Prompt tokens that a step takes within this gap beside one stream."""


@pytest.mark.behaviour("P1")
@pytest.mark.parametrize("prompt_share", [DECODE.prompt_share, PREFILL.prompt_share])
def test_p1_prompts_that_have_time_leave_streams_shorter_gaps_to_their_end(prompt_share: float) -> None:
    """Whatever the engine leans to. In steps of one length: if each took less than the one before, the prompt would
    come late for nothing."""
    world = make_world()
    world.scheduler.lean(prompt_share)
    add_decoding(world, "a", Promise(itl_ms=32.0))

    world.add(make_request("long", LONG, promise=Promise(ttft_ms=2000.0)))

    num_tokens = int(1e3 * calm_room_s(0.1, 0.011, 0.032, 2.0))
    assert [run_step(world) for _ in range(LONG // num_tokens)] == [4] * (LONG // 4)


@pytest.mark.behaviour("P1")
@given(num_others=st.integers(0, 6), ttft_ms=st.integers(200, 3000))
@settings(deadline=None)
def test_p1_prompts_take_more_the_less_time_is_left_to_them(num_others: int, ttft_ms: int) -> None:
    world = make_world()
    add_decoding(world, "a", GAP)
    for index in range(1 + num_others):
        world.add(make_request(str(index), LONG, promise=Promise(ttft_ms=float(ttft_ms))))
    work_s = 1e-3 * LONG * (1 + num_others)
    calm_s = calm_room_s(work_s, 0.011, 0.0315, 1e-3 * ttft_ms)

    room_ms = min(max(1e3 * calm_s, BLOCK_SIZE), HURRIED + 0.5)
    assert -1e-6 <= room_ms - run_step(world) <= 1 + 1e-6


@pytest.mark.behaviour("P1")
@pytest.mark.parametrize("num_between", [0, LOOKED_AT - 2])
def test_p1_a_prompt_with_much_time_is_not_slow_before_one_with_little(num_between: int) -> None:
    much, little = Promise(ttft_ms=60_000.0), Promise(ttft_ms=float(LONG * (4 + 2 * num_between)))
    world = make_world()
    add_decoding(world, "a", GAP)
    for index in range(1 + num_between):
        world.add(make_request(str(index), LONG, promise=much))
    assert run_step(world) < HURRIED / 2

    world.add(make_request("little", LONG, promise=little))
    assert run_step(world) == HURRIED


@pytest.mark.behaviour("P1")
def test_p1_a_prompt_that_nobody_decodes_beside_takes_what_the_gap_leaves() -> None:
    """The gap still holds, since more streams may come; but there is nobody to be calm for."""
    world = make_world()
    add_decoding(world, "a", GAP)
    world.add(make_request("short", 10, max_tokens=1))
    run_step(world)
    world.abort("a")

    world.add(make_request("long", LONG, promise=Promise(ttft_ms=2000.0)))

    assert run_step(world) == HURRIED + 1


@pytest.mark.behaviour("P1")
def test_p1_a_prompt_behind_one_that_was_handed_over_takes_its_time() -> None:
    """The handed-over request needs one token's time, and no other promise."""
    world = make_world()
    add_decoding(world, "a", GAP)
    handed_over = make_request("b", 20, max_tokens=20, ignore_eos=True)
    offer = world.connector.offer(handed_over.prompt_token_ids)
    world.add(make_request("b", tuple(handed_over.prompt_token_ids), max_tokens=20, kv_transfer=offer))
    world.schedule()
    world.end_load("b")
    while world.in_flight:
        world.complete_step()
    world.add(make_request("long", LONG, promise=Promise(ttft_ms=2000.0)))

    assert 0 < run_step(world) < HURRIED / 2
