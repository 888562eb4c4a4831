"""Workers that share the cores of a host: requests are placed so that all streams of the host are served soonest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.promise import Promise
from engine.contract.step_time import COMPUTE_CORE_GAIN, StepTimeModel, StepWork
from router.placement import hosts
from router.placement.fleet import Standing, Standings
from router.placement.hosts import LOSS_MARGIN, SPREAD_MARGIN, WAITING_ROWS
from router.placement.planner import Plan, choose, prepare
from router.placement.prediction import Wish
from tests.support.router.standings import MODEL, fleet_of, predictions, standing, wish_of

GAIN = 0.8
SHARING = replace(MODEL, core_gain=GAIN)
WISH = wish_of(100, 100.0, hand_over_s=0.01)


def worker(host: int = 0, *, cores: int = 2, model: StepTimeModel = SHARING, **changes: float) -> Standing:
    """One with a core of its own, on a host with so many."""
    return standing(model, **{"own_cores": 1.0, "host_cores": float(cores), "host": float(host), **changes})


def step_gain(num_rows: float, *, model: StepTimeModel = SHARING) -> float:
    """The speed-up of a step of this many streams by twice the cores."""
    work = StepWork(num_rows=num_rows)
    return model.seconds(work) / model.on(2.0).seconds(work) - 1.0


def beside_others(*workers: Standing, num_context_tokens: float = 0.0) -> Standings:
    """The workers with the prices that hold for a request with so much context."""
    fleet = fleet_of(*workers)
    prepare(fleet, num_context_tokens=num_context_tokens)
    return fleet


def plan_of(*workers: Standing, wish: Wish = WISH, leaving: tuple[Standing, ...] = ()) -> Plan:
    """Where a request goes, which is to no worker that is ``leaving``."""
    fleet = fleet_of(*workers, *leaving)
    prepare(fleet, num_context_tokens=wish.num_prompt_tokens)
    plan = choose(fleet, wish, [0.0] * len(workers))
    assert plan is not None
    return plan


def test_where_nobody_shares_cores_nothing_changes() -> None:
    model = replace(MODEL, core_gain=0.0)
    workers = standing(model, num_rows=3.0), standing(model)

    assert beside_others(*workers, num_context_tokens=100.0) == fleet_of(*workers)


def test_a_worker_alone_on_its_host_has_all_cores() -> None:
    fleet = beside_others(worker(), worker(), worker(1, num_rows=4.0))

    assert fleet.base_s == pytest.approx([MODEL.base_s / (1.0 + GAIN)] * 3)


def test_a_worker_beside_one_that_computes_has_its_own_cores() -> None:
    fleet = beside_others(worker(num_rows=4.0), worker())

    assert fleet.base_s == pytest.approx([MODEL.base_s / (1.0 + GAIN), MODEL.base_s])
    assert fleet.row_s == pytest.approx([MODEL.row_s / (1.0 + COMPUTE_CORE_GAIN), MODEL.row_s])
    assert fleet.lost_rows == pytest.approx([0.0, LOSS_MARGIN * 4.0 * (1.0 - 1.0 / (1.0 + step_gain(4.0)))])


def test_many_streams_lose_more_of_their_speed_than_few() -> None:
    """Rows add computation to a step, which gains most by more cores."""
    one, many = (beside_others(worker(num_rows=rows), worker()) for rows in (1.0, 32.0))

    assert many.lost_rows[1] / 32.0 > one.lost_rows[1]


def test_who_has_prompts_waiting_loses_what_computing_gains() -> None:
    fleet = beside_others(worker(queued_tokens=500.0), worker())

    lost = LOSS_MARGIN * WAITING_ROWS * (1.0 - 1.0 / (1.0 + COMPUTE_CORE_GAIN))
    assert fleet.lost_rows == pytest.approx([0.0, lost])


def test_of_four_workers_those_that_compute_divide_the_cores() -> None:
    workers = [worker(cores=4, num_rows=4.0), worker(cores=4, num_rows=1.0), worker(cores=4), worker(cores=4)]

    fleet = beside_others(*workers)

    two, three = 1.0 + GAIN, 1.0 + GAIN / 3
    assert [MODEL.base_s / base_s for base_s in fleet.base_s] == pytest.approx([two, two, three, three])
    gains = [(rows, step_gain(rows)) for rows in (4.0, 1.0)]
    lost = LOSS_MARGIN * sum(rows * (1.0 - (1.0 + gain / 3) / (1.0 + gain)) for rows, gain in gains)
    assert fleet.lost_rows == pytest.approx([0.0, 0.0, lost, lost])


@pytest.mark.parametrize("num_rows", [1.0, 4.0, 8.0])
def test_few_streams_of_a_host_are_served_by_one_worker(num_rows: float) -> None:
    plan = plan_of(worker(num_rows=num_rows, num_context_tokens=100.0 * num_rows), worker(leans_to_prompts=1.0))

    assert (plan.prompt, plan.stream) == (0, 0)


def test_a_worker_with_few_streams_is_left_to_end_them() -> None:
    plan = plan_of(worker(num_rows=1.0), worker(num_rows=7.0, leans_to_prompts=1.0))

    assert plan.stream == 1


def test_many_streams_are_spread_where_cores_gain_little_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "COMPUTE_CORE_GAIN", 0.3)
    costly = replace(SHARING, row_s=0.005, core_gain=0.3)
    plan = plan_of(worker(model=costly, num_rows=20.0), worker(model=costly))

    assert plan.stream == 1


def test_streams_are_not_spread_for_a_step_that_is_hardly_shorter() -> None:
    """Prompts would have fewer cores, and each worker reads the weights."""
    model = replace(SHARING, base_s=0.009, row_s=0.001, core_gain=0.7)
    num_rows = next(
        rows
        for rows in range(1, 200)
        if 1.0 < (0.009 / 1.7 + 0.001 * (rows + 1) / 1.9) / (0.009 + 0.0005 * (rows + 1)) < SPREAD_MARGIN
    )

    plan = plan_of(worker(model=model, num_rows=float(num_rows)), worker(model=model))

    assert plan.stream == 0


def test_an_idle_worker_is_taken_to_be_as_the_busy_one_of_its_host() -> None:
    stale = replace(SHARING, base_s=SHARING.base_s / 10, row_s=0.0)

    plan = plan_of(worker(num_rows=8.0), worker(model=stale))

    assert plan.stream == 0


def test_more_streams_than_a_worker_has_rows_for_are_spread() -> None:
    plan = plan_of(worker(num_rows=16.0, max_rows=16.0), worker(max_rows=16.0))

    assert plan.stream == 1


def test_a_worker_that_never_borrowed_is_taken_to_gain_as_much_as_others() -> None:
    unknown = replace(SHARING, core_gain=None)

    assert plan_of(worker(num_rows=6.0), worker(model=unknown)).stream == 0
    assert plan_of(worker(num_rows=6.0, model=unknown), worker(model=unknown)).stream == 0


def test_a_worker_that_takes_no_cores_of_others_lends_its_own() -> None:
    takes, lends = worker(num_rows=4.0), worker(core_gain=0.0)

    fleet = beside_others(takes, lends)

    assert fleet.base_s == pytest.approx([MODEL.base_s / (1.0 + GAIN), MODEL.base_s])
    assert fleet.lost_rows == pytest.approx([0.0, LOSS_MARGIN * 4.0 * (1.0 - 1.0 / (1.0 + step_gain(4.0)))])


def test_what_is_lost_goes_by_the_cores_of_who_comes() -> None:
    workers = [worker(cores=4, num_rows=4.0), worker(cores=4, own_cores=3.0)]

    fleet = beside_others(*workers)

    assert fleet.lost_rows == pytest.approx([0.0, LOSS_MARGIN * 4.0 * (1.0 - 1.0 / (1.0 + 3.0 * step_gain(4.0)))])


def test_a_worker_about_to_go_still_has_its_cores() -> None:
    fleet = beside_others(worker(), worker(num_rows=4.0))

    assert fleet.base_s[0] == pytest.approx(MODEL.base_s)
    assert plan_of(worker(), worker(1), leaving=(worker(num_rows=4.0),)).stream == 1
    assert plan_of(worker(), worker(1, num_rows=2.0)).stream == 0


def test_routers_that_list_workers_in_another_order_choose_the_same() -> None:
    one, other = worker(order=5.0), worker(order=3.0)

    first, second = (list(beside_others(*pair).crowding_s) for pair in ((one, other), (other, one)))

    assert first == second[::-1]
    assert first[1] == 0.0 < first[0]


PROMISED = wish_of(500, 100.0, hand_over_s=0.01, promise=Promise(ttft_ms=600.0, itl_ms=150.0))


@pytest.mark.parametrize("queued_tokens", [100.0, 1000.0, 5000.0])
@pytest.mark.parametrize("idle_leans_to_prompts", [0.0, 1.0])
@pytest.mark.parametrize("wish", [PROMISED, wish_of(500, 100.0, hand_over_s=0.01)], ids=["promised", "not-promised"])
def test_no_worker_takes_cores_from_prompts_that_wait(
    queued_tokens: float, idle_leans_to_prompts: float, wish: Wish
) -> None:
    """What this request would gain, the waiting ones would lose."""
    busy, idle = worker(num_rows=4.0, queued_tokens=queued_tokens), worker(leans_to_prompts=idle_leans_to_prompts)

    assert plan_of(busy, idle, wish=wish).way == (0, 0, False)


def test_promise_is_kept_on_another_host_or_where_there_is_room() -> None:
    busy = worker(num_rows=4.0, queued_tokens=5000.0)

    assert plan_of(busy, worker(), worker(1), worker(1), wish=PROMISED).prompt in (2, 3)
    wish = PROMISED._replace(num_blocks=10.0)
    assert plan_of(busy._replace(num_available_blocks=3.0), worker(), wish=wish).stream == 1


def test_who_takes_no_requests_any_more_is_not_waited_for() -> None:
    leaving = worker(num_rows=4.0, queued_tokens=5000.0)

    assert plan_of(worker(), wish=PROMISED, leaving=(leaving,)).way == (0, 0, False)


def test_another_host_is_as_good_as_before() -> None:
    plan = plan_of(worker(num_rows=8.0), worker(), worker(1), worker(1))

    assert plan.stream in (2, 3)


def test_a_full_worker_is_no_reason_to_wait() -> None:
    plan = plan_of(worker(num_rows=8.0, num_available_blocks=3.0), worker(), wish=WISH._replace(num_blocks=10.0))

    assert plan.stream == 1


HOSTS = st.lists(
    st.builds(
        worker,
        host=st.integers(0, 2),
        cores=st.sampled_from([2, 4]),
        num_rows=st.integers(0, 40).map(float),
        queued_tokens=st.sampled_from([0.0, 0.0, 500.0]),
        num_context_tokens=st.integers(0, 9000).map(float),
    ),
    min_size=1,
    max_size=8,
)


@given(workers=HOSTS, gain=st.floats(0.0, 1.0), num_context=st.integers(0, 5000).map(float))
def test_what_others_lose_is_part_of_what_they_have(workers: list[Standing], gain: float, num_context: float) -> None:
    takers = [item._replace(core_gain=gain) for item in workers]
    fleet, seen = fleet_of(*takers), beside_others(*takers, num_context_tokens=num_context)

    for at, item in enumerate(workers):
        on_host = [other for other in workers if other.host == item.host]
        rows = sum(other.num_rows + WAITING_ROWS * (other.queued_tokens > 0) for other in on_host)
        assert 0.0 <= seen.lost_rows[at] <= LOSS_MARGIN * rows
        assert seen.crowding_s[at] >= 0.0
        assert seen.base_s[at] <= fleet.base_s[at]
    for before, after in zip(predictions(fleet, WISH), predictions(seen, WISH), strict=True):
        assert after.ttft_s <= before.ttft_s + 1e-12
    for host in {item.host for item in workers}:
        assert min(seen.crowding_s[at] for at, item in enumerate(workers) if item.host == host) == 0.0


@given(workers=HOSTS, num_context=st.integers(0, 5000).map(float))
def test_where_cores_gain_nothing_nobody_loses_any(workers: list[Standing], num_context: float) -> None:
    fleet = beside_others(*[item._replace(core_gain=0.0) for item in workers], num_context_tokens=num_context)

    assert list(fleet.lost_rows) == [0.0] * len(workers)
