"""Prompts leave decoding requests their promised gap, as far as steps can be predicted."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.role import DECODE
from engine.contract.promise import NO_PROMISE, Promise
from engine.contract.role import Role
from engine.contract.step_time import ERRORS_KEPT_CLEAR, StepTimeModel
from engine.scheduler.policy.prompt_budget import FIRST_PROMPT_SHARE, REMEMBERED_S
from engine.scheduler.policy.step_timer import work_of
from prefill.role import PREFILL
from tests.support.scheduler.promised_gaps import (
    BLOCK_SIZE,
    LONG,
    add_decoding,
    make_world,
    prompt_tokens,
    run_step,
)
from tests.support.scheduler.scheduler_requests import make_request


@pytest.mark.behaviour("P1")
def test_p1_a_step_takes_as_many_prompt_tokens_as_keep_it_under_the_gap() -> None:
    world = make_world()
    add_decoding(world, "a", Promise(itl_ms=31.5))

    world.add(make_request("long", LONG))

    assert [run_step(world) for _ in range(5)] == [20] * 5


@pytest.mark.behaviour("P1")
def test_p1_running_and_new_prompts_share_what_there_is_in_their_order() -> None:
    world = make_world()
    add_decoding(world, "a", Promise(itl_ms=31.5))
    for name, num_tokens in (("first", 50), ("second", 30)):
        world.add(make_request(name, num_tokens))
    taken: list[list[int]] = []
    for _ in range(4):
        taken.append([count for count in world.schedule().num_scheduled_tokens.tolist() if count > 1])
        world.complete_step()

    assert taken == [[20], [20], [10, 10], [20 - 1]]


@pytest.mark.behaviour("P1")
def test_p1_the_error_of_predictions_is_kept_clear() -> None:
    world = make_world(StepTimeModel(base_s=0.010, row_s=0.001, prompt_token_s=0.001, error=0.05, num_steps=1))
    add_decoding(world, "a", Promise(itl_ms=40.0))

    world.add(make_request("long", LONG))

    assert run_step(world) == pytest.approx(40 / (1 + 0.05 * ERRORS_KEPT_CLEAR) - 11, abs=1)


@pytest.mark.behaviour("P1")
def test_p1_the_tightest_gap_counts_and_goes_with_its_request() -> None:
    world = make_world()
    add_decoding(world, "loose", Promise(itl_ms=52.5))
    add_decoding(world, "tight", Promise(itl_ms=22.5))
    world.add(make_request("long", LONG))

    assert run_step(world) == 10
    world.abort("tight")
    assert run_step(world) == 41


@pytest.mark.behaviour("P1")
@pytest.mark.parametrize("promise", [NO_PROMISE, Promise(ttft_ms=10.0)])
def test_p1_without_a_promised_gap_prompts_take_the_whole_budget(promise: Promise) -> None:
    world = make_world()
    add_decoding(world, "a", promise)

    world.add(make_request("long", LONG))

    assert run_step(world) == 63


@pytest.mark.behaviour("P1")
def test_p1_the_first_promise_counts_after_steps_that_had_none() -> None:
    world = make_world()
    for index in range(8):
        add_decoding(world, f"row{index}", NO_PROMISE)
    world.add(make_request("waits", 60))
    assert [run_step(world) for _ in range(3)] == [0] * 3
    world.abort("row0")
    assert run_step(world) == 64 - 7
    world.abort("row1")
    world.add(make_request("tight", 5, max_tokens=90, ignore_eos=True, promise=Promise(itl_ms=31.5)))
    assert run_step(world) == 3 + 5
    world.abort("row2")
    world.add(make_request("long", LONG))

    assert run_step(world) == 14, "7 requests decode: 17 of 31.5 ms"


@pytest.mark.behaviour("P1")
def test_p1_without_decoding_requests_prompts_take_the_whole_budget() -> None:
    world = make_world()

    world.add(make_request("long", LONG, promise=Promise(itl_ms=15.0)))

    assert run_step(world) == 64


@pytest.mark.behaviour("P1")
def test_p1_a_prompt_that_nobody_decodes_beside_waits_for_no_other_one() -> None:
    world = make_world()
    for name in ("first", "second"):
        world.add(make_request(name, 40, promise=Promise(itl_ms=15.0)))

    assert run_step(world) == 40


@pytest.mark.behaviour("P2")
def test_p2_prompts_share_a_step_until_its_base_is_a_small_share() -> None:
    world = make_world(StepTimeModel(base_s=0.005, prompt_token_s=0.001, error=0.0, num_steps=1))
    for index in range(4):
        world.add(make_request(str(index), 20))

    assert [run_step(world) for _ in range(3)] == [45, 35, 0]


@pytest.mark.behaviour("P2")
def test_p2_a_long_prompt_is_computed_whole_and_alone() -> None:
    world = make_world(StepTimeModel(base_s=0.001, prompt_token_s=0.001, error=0.0, num_steps=1))
    for name in ("first", "second"):
        world.add(make_request(name, 40))

    assert run_step(world) == 40


@pytest.mark.behaviour("P2")
def test_p2_where_prompts_cost_little_beside_a_step_they_fill_it() -> None:
    world = make_world(StepTimeModel(base_s=0.010, prompt_token_s=0.0001, error=0.0, num_steps=1))
    for index in range(4):
        world.add(make_request(str(index), 30))

    assert run_step(world) == 64


@pytest.mark.behaviour("P2")
def test_p2_beside_requests_that_decode_all_prompts_begin() -> None:
    world = make_world(StepTimeModel(base_s=0.001, row_s=0.001, prompt_token_s=0.001, error=0.0, num_steps=1))
    add_decoding(world, "a", NO_PROMISE)
    for name in ("first", "second"):
        world.add(make_request(name, 30))

    assert run_step(world) == 60


@pytest.mark.behaviour("P1")
def test_p1_a_gap_holds_for_a_moment_after_the_last_request_that_was_promised_it() -> None:
    world = make_world()
    add_decoding(world, "a", Promise(itl_ms=31.5))
    world.add(make_request("long", LONG))
    run_step(world)
    world.abort("a")

    bounded = run_step(world)
    world.now_s += REMEMBERED_S
    whole = run_step(world)

    assert (bounded, whole) == (21, LONG - 20 - 21)


@pytest.mark.behaviour("P1")
def test_p1_nothing_is_limited_before_step_times_are_known() -> None:
    world = make_world(StepTimeModel())
    add_decoding(world, "a", Promise(itl_ms=15.0))

    world.add(make_request("long", LONG))

    assert run_step(world) == 63


@pytest.mark.behaviour("P1")
def test_p1_prompts_that_are_computed_whole_are_not_limited() -> None:
    world = make_world(budget=200, enable_chunked_prefill=False)
    add_decoding(world, "a", Promise(itl_ms=15.0))

    world.add(make_request("long", LONG))

    assert run_step(world) == LONG


@pytest.mark.behaviour("P1")
def test_p1_a_prompt_goes_on_where_decoding_alone_takes_longer_than_the_gap() -> None:
    slow = StepTimeModel(base_s=0.100, row_s=0.001, prompt_token_s=0.001, error=0.0, num_steps=1)
    world = make_world(slow)
    add_decoding(world, "a", Promise(itl_ms=5.0))

    world.add(make_request("long", LONG))

    assert run_step(world) == int(FIRST_PROMPT_SHARE * 101)


@pytest.mark.behaviour("P1")
@pytest.mark.parametrize("role", [PREFILL, DECODE], ids=lambda role: role.name)
def test_p1_what_a_worker_leans_to_has_more_of_its_steps(role: Role) -> None:
    slow = StepTimeModel(base_s=0.100, row_s=0.001, prompt_token_s=0.001, error=0.0, num_steps=1)
    world = make_world(slow, budget=3 * LONG)
    add_decoding(world, "a", Promise(itl_ms=5.0))
    world.scheduler.lean(role.prompt_share)

    world.add(make_request("long", LONG + 50))

    assert run_step(world) == int(role.prompt_share * 101)


@pytest.mark.behaviour("P1")
def test_p1_a_prompt_gets_a_block_a_step_at_least() -> None:
    world = make_world(StepTimeModel(base_s=0.010, prompt_token_s=1.0, error=0.0, num_steps=1))
    add_decoding(world, "a", Promise(itl_ms=5.0))

    world.add(make_request("long", LONG))

    assert [run_step(world) for _ in range(3)] == [BLOCK_SIZE] * 3


@pytest.mark.behaviour("P1")
def test_p1_what_prompts_read_counts() -> None:
    world = make_world(StepTimeModel(base_s=0.010, prompt_token_s=1e-5, prompt_read_s=1e-4, error=0.0, num_steps=1))
    add_decoding(world, "a", Promise(itl_ms=60.0))
    world.add(make_request("long", LONG))

    taken = [run_step(world) for _ in range(4)]

    assert taken[0] == 31
    assert taken == sorted(taken, reverse=True)
    assert taken[3] < 16


@pytest.mark.behaviour("P1")
def test_p1_a_prompt_that_would_be_late_leaves_the_others_their_gap() -> None:
    """More of it per step would break the gaps of all streams for one first token."""
    world = make_world()
    add_decoding(world, "a", Promise(itl_ms=31.5))

    world.add(make_request("long", LONG, promise=Promise(ttft_ms=130.0)))

    assert [run_step(world) for _ in range(5)] == [20] * 5


@pytest.mark.behaviour("P1")
def test_p1_a_prompt_that_is_late_anyway_leaves_the_others_their_gap() -> None:
    world = make_world()
    add_decoding(world, "a", Promise(itl_ms=31.5))

    world.add(make_request("hopeless", LONG, promise=Promise(ttft_ms=40.0)))

    assert [run_step(world) for _ in range(5)] == [20] * 5


@pytest.mark.behaviour("P1")
def test_p1_decoding_requests_get_their_token_behind_a_prompt_that_started_before() -> None:
    world = make_world(StepTimeModel(base_s=0.010, error=0.0, prompt_token_s=0.001, num_steps=1), budget=16)
    add_decoding(world, "a", Promise(itl_ms=15.5))
    world.add(make_request("long", LONG))
    world.step()
    world.add(make_request("short", 1, promise=Promise(itl_ms=500.0), ignore_eos=True))
    world.step()
    world.abort("a")
    num_before = len(world.endings["short"].token_ids)

    taken = [run_step(world) for _ in range(4)]

    assert taken == [15] * 4
    assert len(world.endings["short"].token_ids) == num_before + 4


@pytest.mark.behaviour("P1")
def test_p1_steps_that_run_ahead_keep_the_gap() -> None:
    world = make_world()
    add_decoding(world, "a", Promise(itl_ms=31.5))
    world.add(make_request("long", LONG))
    outputs = [world.schedule(), world.schedule()]
    for _ in range(3):
        world.complete_step()
        outputs.append(world.schedule())

    assert [prompt_tokens(output) for output in outputs] == [20] * 5
    assert all(output.rows.size == 2 for output in outputs)


@pytest.mark.behaviour("P1")
def test_p1_partial_prefills_share_what_the_gap_leaves() -> None:
    world = make_world(max_num_partial_prefills=2)
    add_decoding(world, "a", Promise(itl_ms=31.5))
    for name in ("first", "second"):
        world.add(make_request(name, 40))

    counts = [sorted(world.step().num_scheduled_tokens.tolist()) for _ in range(2)]

    assert counts == [[1, 8, 8]] * 2


@pytest.mark.behaviour("P1")
@settings(max_examples=60, deadline=None)
@given(
    prices=st.tuples(st.floats(0.001, 0.05), st.floats(0.0, 0.005), st.floats(0.0, 0.003), st.floats(0.0, 1e-4)),
    promises=st.lists(
        st.tuples(st.sampled_from([None, 5.0, 30.0, 100.0]), st.sampled_from([None, 50.0, 500.0])),
        min_size=2,
        max_size=7,
    ),
    prompts=st.lists(st.integers(1, 120), min_size=7, max_size=7),
    budget=st.sampled_from([8, 64, 256]),
    num_partial=st.sampled_from([0, 0, 2]),
    most_known=st.sampled_from([math.inf, 0.0, 6.0]),
)
def test_p1_whatever_is_promised_everybody_ends_and_a_step_is_long_for_a_reason(
    prices: tuple[float, float, float, float],
    promises: list[tuple[float | None, float | None]],
    prompts: list[int],
    budget: int,
    num_partial: int,
    most_known: float,
) -> None:
    base_s, row_s, prompt_token_s, prompt_read_s = prices
    model = StepTimeModel(
        base_s=base_s, row_s=row_s, prompt_token_s=prompt_token_s, prompt_read_s=prompt_read_s, error=0.0, num_steps=1
    )
    world = make_world(model, budget=budget, max_num_partial_prefills=num_partial)
    world.scheduler._timer._fit.most_prompt_tokens = most_known
    for index, ((itl_ms, ttft_ms), num_tokens) in enumerate(zip(promises, prompts, strict=False)):
        promise = Promise(itl_ms=itl_ms, ttft_ms=ttft_ms)
        world.add(make_request(f"r{index}", num_tokens, max_tokens=12, ignore_eos=True, promise=promise))

    for _ in range(2000):
        if not world.scheduler.has_work():
            break
        table = world.scheduler._table
        rows = table.order
        decoding = rows[table.num_expected[rows] - table.num_computed[rows] == 1]
        gap_s = min(table.promised_gap[decoding].tolist(), default=2**31 - 1) / 1e6
        output = world.schedule()
        work = work_of(world.scheduler._in_flight[-1].batch) if output.has_work else None
        while world.in_flight:
            world.complete_step()
        if work is None or not decoding.size or gap_s > 1000:
            continue
        assert set(decoding.tolist()) <= set(output.rows.tolist()), "a decoding request got no token"
        decode_s = model.seconds(work._replace(num_prompt_tokens=0, num_prompt_reads=0))
        is_kept = model.seconds(work) <= 2.0 * gap_s + decode_s - base_s + 1e-9
        is_least = (
            work.num_prompt_tokens <= BLOCK_SIZE or model.seconds(work) <= (1 + FIRST_PROMPT_SHARE) * decode_s + 1e-9
        )
        has_many_prompts = (output.num_scheduled_tokens > 1).sum() > 1
        assert is_kept or is_least or (has_many_prompts and prompt_read_s > 0.0)
    assert not world.scheduler.has_unfinished()
    for request_id in world.requests:
        world.check_output(request_id)
