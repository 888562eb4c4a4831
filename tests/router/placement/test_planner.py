"""Placement by predictions: properties of every plan, and typical cases."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.promise import Promise
from engine.contract.step_time import aim_share
from router.placement.fleet import Fleet, Standing
from router.placement.planner import Plan, are_any_known, choose, choose_prompt, prepare, weigh
from router.placement.prediction import Wish
from tests.support.router.standings import MODEL, WISHES, costs_at, fleet_of, predictions, standing, wish_of


def plan_of(*replicas: Standing, cached: tuple[float, ...] = (), **changes: object) -> Plan | None:
    wish = wish_of(**{"num_prompt_tokens": 1000, "num_new_tokens": 100.0, "hand_over_s": 0.02, **changes})  # type: ignore[arg-type]
    return choose(fleet_of(*replicas), wish, list(cached) or [0.0] * len(replicas))


REPLICAS = st.lists(
    st.builds(
        standing,
        num_available_blocks=st.integers(0, 100).map(float),
        queued_tokens=st.integers(0, 50_000).map(float),
        num_rows=st.integers(0, 200).map(float),
        num_context_tokens=st.integers(0, 100_000).map(float),
        prompt_share=st.floats(0, 1),
        leans_to_prompts=st.sampled_from([0.0, 0.5, 1.0]),
        is_idle=st.sampled_from([0.0, 1.0]),
    ),
    min_size=1,
    max_size=6,
)


@given(replicas=REPLICAS, wish=WISHES)
def test_streams_go_where_there_is_room_and_nobody_waits_while_there_is_some(
    replicas: list[Standing], wish: Wish
) -> None:
    plan = choose(fleet_of(*replicas), wish, [0.0] * len(replicas))

    has_room = [item.num_available_blocks >= wish.num_blocks or item.is_idle > 0 for item in replicas]
    assert (plan is not None) == any(has_room)
    assert plan is None or has_room[plan.stream]


@given(replicas=REPLICAS, wish=WISHES)
def test_no_worker_alone_would_cost_less(replicas: list[Standing], wish: Wish) -> None:
    fleet, cached = fleet_of(*replicas), [0.0] * len(replicas)
    plan = choose(fleet, wish, cached)
    together = [
        here.prompt + here.stream
        for here, item in zip(costs_at(fleet, wish), replicas, strict=True)
        if item.num_available_blocks >= wish.num_blocks or item.is_idle > 0
    ]

    assert plan is None or plan.cost <= 1.08 * min(together)


@given(replicas=REPLICAS, wish=WISHES, queued=st.integers(1, 50_000))
def test_more_ahead_is_never_predicted_to_be_sooner(replicas: list[Standing], wish: Wish, queued: int) -> None:
    longer = [item._replace(queued_tokens=item.queued_tokens + queued) for item in replicas]

    before, after = (predictions(fleet_of(*items), wish) for items in (replicas, longer))

    assert all(later.ttft_s >= sooner.ttft_s for sooner, later in zip(before, after, strict=True))


def test_an_idle_worker_does_all_of_a_request() -> None:
    plan = plan_of(standing(num_rows=8.0), standing())

    assert plan is not None
    assert plan.is_colocated
    assert plan.stream == 1


def test_streams_are_spared_a_long_prompt_where_a_worker_has_none() -> None:
    busy = standing(num_rows=30.0, num_context_tokens=10_000.0)
    plan = plan_of(
        standing(leans_to_prompts=1.0, num_available_blocks=5.0, queued_tokens=1.0),
        busy,
        num_prompt_tokens=8000,
        num_blocks=50,
    )

    assert plan == Plan(prompt=0, stream=1, cost=plan.cost if plan else 0.0)


def test_a_prompt_goes_where_most_of_it_is_cached() -> None:
    plan = plan_of(standing(), standing(), standing(), cached=(0.0, 990.0, 0.0), num_prompt_tokens=1000)

    assert plan is not None
    assert plan.prompt == 1


def test_what_a_busy_worker_has_cached_is_handed_to_one_that_has_room() -> None:
    busy = standing(num_rows=60.0, num_context_tokens=60_000.0)
    plan = plan_of(busy, standing(), cached=(4800.0, 0.0), num_prompt_tokens=8000, least_head_tokens=64)

    assert plan == Plan(prompt=0, stream=1, cost=plan.cost if plan else 0.0, num_head_tokens=4801)
    assert plan_of(busy, standing(), cached=(4800.0, 0.0), num_prompt_tokens=8000) != plan


def test_a_prompt_that_is_cached_where_there_is_room_is_not_split() -> None:
    plan = plan_of(standing(), standing(), cached=(4800.0, 0.0), num_prompt_tokens=8000, least_head_tokens=64)

    assert plan is not None
    assert (plan.prompt, plan.num_head_tokens) == (0, 0)


def test_splitting_a_prompt_is_weighed_whether_it_is_chosen_or_not() -> None:
    fleet = fleet_of(standing(num_rows=24.0, num_context_tokens=24_000.0), standing())
    wish = wish_of(8000, 100.0, least_head_tokens=64.0)
    cached = [4800.0, 0.0]
    chosen = choose(fleet, wish, cached)
    assert chosen is not None

    weighed = weigh(fleet, wish, cached, chosen, limit=4)
    whole = replace(chosen, num_head_tokens=0) if chosen.is_split else chosen
    others = weigh(fleet, wish, cached, whole, limit=4)

    assert weighed[0].plan == chosen
    for found in (weighed, others):
        [split] = [item for item in found if item.plan.is_split]
        [alone] = [item for item in found if item.plan.way == (1, 1, False)]
        assert split.plan.num_head_tokens == 4801
        assert 0.0 < split.ttft_s < alone.ttft_s  # it computes less


@given(replicas=REPLICAS, wish=WISHES, data=st.data())
def test_a_prompt_is_split_only_where_that_costs_less(
    replicas: list[Standing], wish: Wish, data: st.DataObject
) -> None:
    sizes = st.integers(0, int(wish.num_prompt_tokens) - 1).map(float)
    cached = data.draw(st.lists(sizes, min_size=len(replicas), max_size=len(replicas)))
    fleet = fleet_of(*replicas)

    whole, split = (choose(fleet, wish._replace(least_head_tokens=least), cached) for least in (0.0, 64.0))

    assert (whole is None) == (split is None)
    if whole is None or split is None or not split.num_head_tokens:
        assert split == whole
        return
    assert split.cost < whole.cost
    assert split.prompt != split.stream
    assert 64 < split.num_head_tokens == cached[split.prompt] + 1 < wish.num_prompt_tokens
    assert fleet.num_available_blocks[split.stream] >= wish.num_blocks or fleet.is_idle[split.stream]


def test_a_full_decode_worker_sends_streams_to_one_that_leans_to_prompts() -> None:
    plan = plan_of(
        standing(leans_to_prompts=1.0, queued_tokens=10.0),
        standing(num_available_blocks=1.0, num_rows=50.0),
        num_blocks=20,
        num_prompt_blocks=20,
    )

    assert plan is not None
    assert plan.stream == 0


def test_a_prompt_leaves_a_queue_that_would_break_its_promise() -> None:
    behind = standing(leans_to_prompts=1.0, queued_tokens=20_000.0)
    promise = Promise(ttft_ms=1000.0, itl_ms=100.0)

    plan = plan_of(behind, standing(num_rows=4.0), promise=promise)

    assert plan is not None
    assert plan.prompt == 1


def test_a_step_beside_streams_takes_as_many_prompt_tokens_as_the_promised_gap_leaves() -> None:
    alone, beside = standing(), standing(num_rows=20.0)
    wish = wish_of(2000, 10.0, promise=Promise(itl_ms=40.0))

    there, here = predictions(fleet_of(alone, beside), wish)

    assert there.ttft_s == pytest.approx(MODEL.prompt_seconds(2000), rel=0.05)
    num_steps = math.ceil(2000 * 0.0002 / (aim_share(MODEL.error) * 0.040 - 0.015))
    assert here.ttft_s == pytest.approx(2000 * 0.0002 + num_steps * 0.015, rel=0.05)


@pytest.mark.parametrize(("num_prompt_tokens", "num_new_tokens", "at"), [(4000, 2.0, 0), (10, 500.0, 1)])
def test_near_ties_go_where_the_roles_want_them(num_prompt_tokens: int, num_new_tokens: float, at: int) -> None:
    plan = plan_of(
        standing(leans_to_prompts=1.0),
        standing(),
        num_prompt_tokens=num_prompt_tokens,
        num_new_tokens=num_new_tokens,
        hand_over_s=0.0,
    )

    assert plan is not None
    assert (plan.prompt, plan.stream) == (at, at)


def test_leanings_alone_are_no_reason_for_a_hand_over() -> None:
    plan = plan_of(standing(leans_to_prompts=1.0), standing(), num_new_tokens=2000.0, hand_over_s=0.0)

    assert plan is not None
    assert plan.is_colocated


def test_equal_replicas_are_not_all_chosen_in_the_same_order() -> None:
    chosen = {plan.stream for key in range(50) if (plan := plan_of(*[standing()] * 8, key=key)) is not None}

    assert len(chosen) > 4


def test_unknown_prices_are_taken_to_be_those_of_the_others() -> None:
    unknown = standing()._replace(base_s=0.0, row_s=0.0, prompt_token_s=0.0, is_known=0.0, knows_prompts=0.0)
    fleet = fleet_of(standing(), unknown)

    assert are_any_known(fleet, 2)
    assert not are_any_known(fleet_of(unknown), 1)
    prepare(fleet, num_context_tokens=0.0)
    assert fleet.prompt_token_s == pytest.approx([MODEL.prompt_token_s] * 2)


def test_a_replica_that_never_had_rows_to_price_does_not_get_all_streams() -> None:
    known = replace(MODEL, row_s=0.001, most_rows=32.0)
    unpriced = replace(MODEL, base_s=0.006, row_s=0.0, context_token_s=0.0, most_rows=2.0)
    fleet = fleet_of(standing(known, num_rows=4.0), standing(unpriced, num_rows=40.0))
    prepare(fleet, num_context_tokens=1000.0)
    plan = choose(fleet, wish_of(1000, 100.0), [0.0, 0.0])

    assert plan is not None
    assert plan.stream == 0


def test_what_is_known_of_workers_that_take_no_requests_is_no_reason_to_predict() -> None:
    unknown = standing()._replace(is_known=0.0, knows_prompts=0.0)

    assert not are_any_known(fleet_of(unknown, standing()), 1)


def test_prompts_are_not_priced_by_workers_that_saw_none() -> None:
    fresh = standing(prompt_token_s=0.02, prompt_read_s=1e-6, knows_prompts=0.0)
    fleet = fleet_of(standing(), fresh)

    assert not are_any_known(fleet_of(fresh), 1)
    prepare(fleet, num_context_tokens=0.0)
    assert fleet.prompt_token_s == pytest.approx([MODEL.prompt_token_s] * 2)
    assert fleet.prompt_read_s == pytest.approx([MODEL.prompt_read_s] * 2)


def test_prices_without_any_of_a_token_predict_a_finite_number_of_steps() -> None:
    only_reads = standing(prompt_token_s=0.0, prompt_read_s=1e-6)
    [predicted] = predictions(fleet_of(only_reads), wish_of(1000, 0.0, promise=Promise(itl_ms=100.0)))

    assert predicted.ttft_s == pytest.approx(0.5 + MODEL.base_s, rel=0.05)


def test_coming_to_a_worker_in_long_steps_costs_more_than_to_a_calm_one() -> None:
    fleet = fleet_of(standing(num_rows=1.0, queued_tokens=500.0, prompt_share=0.9), standing(num_rows=1.0))
    wish = wish_of(500, 9.0, promise=Promise(ttft_ms=2000.0, itl_ms=100.0))

    hurried, calm = predictions(fleet, wish)
    costs = costs_at(fleet, wish)

    assert hurried.joining_s > 0.1 > calm.joining_s
    assert costs[0].joining > 50 * costs[1].joining


def test_a_stream_waits_longer_for_a_worker_that_has_only_prompts() -> None:
    wish = wish_of(2000, 9.0, promise=Promise(itl_ms=100.0))
    replicas = standing(num_rows=1.0, queued_tokens=4000.0), standing(queued_tokens=4000.0)

    with_streams, without = predictions(fleet_of(*replicas), wish)

    assert without.joining_s > with_streams.joining_s + 0.1


def test_a_queue_that_leaves_no_slack_is_avoided_before_it_breaks_the_promise() -> None:
    promise = Promise(ttft_ms=1000.0, itl_ms=100.0)
    behind = standing(leans_to_prompts=1.0, queued_tokens=3800.0)

    plan = plan_of(behind, standing(num_rows=8.0), promise=promise, num_prompt_tokens=1000)

    assert plan is not None
    assert plan.prompt == 1


def test_a_prompt_alone_goes_where_it_is_done_and_delays_nobody() -> None:
    fleet = fleet_of(standing(num_rows=40.0), standing(queued_tokens=100.0))

    assert choose_prompt(fleet, wish_of(1000, 0.0), [0.0, 0.0]) == 1


def test_slots_are_used_again_and_there_are_always_enough() -> None:
    fleet = Fleet()
    slots = [fleet.take_slot() for _ in range(40)]
    fleet.give_back(slots[7])

    assert len(set(slots)) == 40
    assert fleet.take_slot() == slots[7]


def test_deferred_prompts_make_nobody_late_and_decide_between_replicas_that_are_alike() -> None:
    """Who is in time passes them; but where they are fewer they are served sooner."""
    deferred, queued = standing(deferred_tokens=50_000.0), standing(queued_tokens=10_000.0)
    promise = Promise(ttft_ms=1500.0, itl_ms=100.0)

    in_time = plan_of(queued, deferred, promise=promise)
    alike = plan_of(deferred, standing(deferred_tokens=1000.0), promise=promise)

    assert in_time is not None
    assert alike is not None
    assert (in_time.prompt, alike.prompt) == (1, 1)


DIVIDED = (standing(keeps_to=1.0, num_rows=6.0), standing(keeps_to=-1.0), standing(keeps_to=-1.0, queued_tokens=500.0))


def test_divided_work_goes_where_it_belongs() -> None:
    plan = plan_of(*DIVIDED, promise=Promise(ttft_ms=2000.0, itl_ms=100.0))

    assert plan is not None
    assert (plan.prompt, plan.stream) == (1, 0)


def test_a_request_that_was_promised_no_gaps_goes_where_it_is_cheapest() -> None:
    plan = plan_of(*DIVIDED, promise=Promise(ttft_ms=2000.0))

    assert plan is not None
    assert (plan.prompt, plan.stream) == (1, 1)


def test_a_stream_goes_to_a_worker_that_keeps_to_prompts_where_its_promise_would_be_missed_by_far() -> None:
    crowded = DIVIDED[0]._replace(num_rows=400.0)

    plan = plan_of(crowded, *DIVIDED[1:], promise=Promise(ttft_ms=2000.0, itl_ms=100.0))

    assert plan is not None
    assert (plan.prompt, plan.stream) == (1, 1)


def test_a_worker_that_keeps_to_prompts_generates_while_the_others_have_no_room() -> None:
    full = DIVIDED[0]._replace(num_available_blocks=1.0)

    plan = plan_of(full, *DIVIDED[1:], promise=Promise(ttft_ms=2000.0, itl_ms=100.0), num_blocks=60.0)

    assert plan is not None
    assert plan.stream in (1, 2)
