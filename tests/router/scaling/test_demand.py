"""The forecast of the load from recent requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.promise import Promise
from router.placement.prediction import NEVER
from router.report.arrivals import MAX_ARRIVALS, ArrivalSample, RecentArrivals
from router.scaling.demand import MAX_GROWTH, MIN_WINDOW_S, demand_of, growth, no_demand
from tests.support.clock import ManualClock


def sample(*arrivals: tuple[float, int, int, int], window_s: float = 60.0) -> ArrivalSample:
    return ArrivalSample(window_s=window_s, arrivals=arrivals)


def test_only_what_came_within_the_window_is_told() -> None:
    clock = ManualClock()
    recent = RecentArrivals(window_s=30.0, clock=clock)
    recent.note(100)
    clock.advance(20.0)
    arrival = recent.note(50, Promise(ttft_ms=500.0))
    arrival.num_cached_tokens, arrival.num_output_tokens = 16, 7
    clock.advance(15.0)

    assert recent.sample() == ArrivalSample(window_s=30.0, arrivals=((15.0, 50, 16, 7),), promises=((500.0, None),))


def test_where_more_come_than_are_remembered_the_window_is_shorter() -> None:
    clock = ManualClock()
    recent = RecentArrivals(window_s=60.0, clock=clock)
    for _ in range(2 * MAX_ARRIVALS):
        clock.advance(0.01)
        recent.note(1)

    told = recent.sample()
    assert len(told.arrivals) == MAX_ARRIVALS
    assert told.window_s == pytest.approx(0.01 * (MAX_ARRIVALS - 1))


def test_nothing_came_is_no_demand() -> None:
    promise = Promise(itl_ms=50.0)

    demand = demand_of([sample(), sample(window_s=5.0)], typical_output=10.0, horizon_s=10.0, promise=promise)

    assert demand == no_demand(promise)
    assert demand.tight_gap_s == 0.05


def test_each_request_has_what_it_was_promised() -> None:
    """One router tells it, and an older one does not."""
    lax, tight = (60_000.0, None), (500.0, 40.0)
    new = ArrivalSample(window_s=60.0, arrivals=((50.0, 10, 0, 1),) * 2, promises=(lax, tight))
    old = sample((40.0, 10, 0, 1))

    demand = demand_of([new, old], typical_output=1.0, horizon_s=0.0, promise=Promise(ttft_ms=2000.0, itl_ms=100.0))

    assert [item.ttft_s for item in demand.prompts] == [60.0, 0.5, 2.0]
    assert [(gap_s, pytest.approx(1 / 3)) for gap_s, _ in demand.gaps_s] == list(demand.gaps_s)
    assert [gap_s for gap_s, _ in demand.gaps_s] == [0.04, 0.1, NEVER]


@pytest.mark.parametrize(("num_tight", "tight_gap_s"), [(9, 0.1), (10, 0.04)])
def test_steps_keep_the_gap_of_a_tenth(num_tight: int, tight_gap_s: float) -> None:
    promises = ((None, 40.0),) * num_tight + ((None, 100.0),) * (100 - num_tight)
    told = ArrivalSample(window_s=60.0, arrivals=((30.0, 10, 0, 1),) * 100, promises=promises)

    assert demand_of([told], typical_output=1.0, horizon_s=0.0).tight_gap_s == tight_gap_s


def test_what_is_not_known_yet_is_as_the_others_are() -> None:
    demand = demand_of([sample((30.0, 100, 50, 20), (20.0, 200, -1, -1))], typical_output=1000.0, horizon_s=0.0)

    assert [(item.num_new_tokens, item.num_cached_tokens) for item in demand.prompts] == [(50.0, 50.0), (100.0, 100.0)]
    assert demand.tokens_per_s == pytest.approx(40.0 / 60.0)


def test_all_routers_load_comes_together() -> None:
    one, two = sample((50.0, 10, 0, 1), (10.0, 10, 0, 1)), sample((30.0, 10, 0, 1), window_s=40.0)

    demand = demand_of([one, two], typical_output=1.0, horizon_s=0.0)

    assert [item.at_s for item in demand.prompts] == [10.0, 30.0]
    assert demand.window_s == 40.0


def test_a_first_request_is_no_flood() -> None:
    demand = demand_of([sample((0.1, 10, 0, 1), window_s=0.2)], typical_output=1.0, horizon_s=10.0)

    assert demand.window_s == MIN_WINDOW_S


def test_a_rate_that_doubles_goes_on_to_grow_by_as_much() -> None:
    """2 a second, then 4: on average 3, by now 4, and half a minute from now 5."""
    times_s = [index * 0.5 for index in range(60)] + [30.0 + index * 0.25 for index in range(120)]

    now, ahead = (growth(times_s, window_s=60.0, horizon_s=horizon_s) for horizon_s in (0.0, 30.0))

    assert (now, ahead) == (pytest.approx(4 / 3), pytest.approx(5 / 3))


@pytest.mark.parametrize(("num_late", "grows"), [(65, False), (75, True)])
def test_a_difference_that_may_be_chance_is_no_growth(num_late: int, grows: bool) -> None:
    times_s = [10.0] * 50 + [50.0] * num_late

    assert (growth(times_s, window_s=60.0, horizon_s=10.0) > 1.0) == grows


@given(st.lists(st.floats(0, 60), max_size=50), st.floats(0, 100))
def test_growth_is_bounded(times_s: list[float], horizon_s: float) -> None:
    assert 1.0 <= growth(times_s, window_s=60.0, horizon_s=horizon_s) <= MAX_GROWTH


@given(st.integers(1, 500), st.floats(0, 100))
def test_a_steady_rate_does_not_grow(number: int, horizon_s: float) -> None:
    times_s = [60.0 * (index + 0.5) / number for index in range(number)]

    assert growth(times_s, window_s=60.0, horizon_s=horizon_s) == 1.0
