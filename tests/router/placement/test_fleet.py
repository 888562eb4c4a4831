"""Slots of replicas, numbers of their hosts, and prices that they share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.step_time import StepTimeModel
from router.placement.fleet import LEAST_BASE_SHARE, PRIOR_ROWS, Fleet, pool_row_prices
from tests.support.router.standings import fleet_of, standing

MOVES = st.lists(st.tuples(st.sampled_from(["come", "go"]), st.integers(0, 9), st.sampled_from("abcd")), max_size=60)


@given(moves=MOVES)
def test_replicas_have_the_same_number_where_they_have_the_same_host_and_numbers_are_used_again(
    moves: list[tuple[str, int, str]],
) -> None:
    fleet, homes = Fleet(), dict[int, str]()
    for move, which, address in moves:
        if move == "come":
            homes[fleet.take_slot()] = address
        elif homes:
            slot = sorted(homes)[which % len(homes)]
            del homes[slot]
            fleet.give_back(slot)
        numbers = {slot: fleet.host(slot, home) for slot, home in homes.items()}

        assert len({(home, numbers[slot]) for slot, home in homes.items()}) == len(set(homes.values()))
        assert len(set(numbers.values())) == len(set(homes.values()))
        assert all(number < 4 for number in numbers.values()), "there are never more than four hosts"


def test_a_host_that_comes_and_goes_under_ever_new_addresses_takes_no_more_numbers() -> None:
    fleet, slots = Fleet(), list[int]()
    for index in range(100):
        slots.append(fleet.take_slot())
        assert fleet.host(slots[-1], f"10.0.0.{index}") < 3
        if len(slots) > 2:
            fleet.give_back(slots.pop(0))


PRICED = st.builds(
    lambda base_s, row_share, context_share, most_rows: StepTimeModel(
        base_s=base_s,
        row_s=row_share * base_s,
        context_token_s=context_share * base_s,
        most_rows=float(most_rows),
        error=0.1,
        num_steps=50,
    ),
    base_s=st.floats(1e-4, 1e-1),
    row_share=st.floats(0, 1),
    context_share=st.floats(0, 1e-3),
    most_rows=st.integers(0, 200),
)
MODELS = st.lists(PRICED, min_size=1, max_size=6)


@given(models=MODELS)
def test_row_prices_move_towards_the_mean_of_the_fleet_and_less_the_more_rows_were_seen(
    models: list[StepTimeModel],
) -> None:
    fleet = fleet_of(*map(standing, models))
    pool_row_prices(fleet)

    before = [model.row_s / model.base_s for model in models]
    after = [fleet.row_s[at] / model.base_s for at, model in enumerate(models)]
    num_rows = sum(model.most_rows for model in models)
    if num_rows == 0:
        assert after == before
        return
    mean = sum(share * model.most_rows for share, model in zip(before, models, strict=True)) / num_rows
    for old, new, model in zip(before, after, models, strict=True):
        kept = model.most_rows / (model.most_rows + PRIOR_ROWS)
        assert new - mean == pytest.approx(kept * (old - mean), abs=1e-9)


@given(models=MODELS)
def test_steps_with_half_of_the_most_rows_are_predicted_as_before(models: list[StepTimeModel]) -> None:
    fleet = fleet_of(*map(standing, models))
    pool_row_prices(fleet)

    for at, model in enumerate(models):
        num_rows = model.most_rows / 2.0
        least_s = LEAST_BASE_SHARE * model.base_s
        expected_s = max(model.base_s + model.row_s * num_rows, least_s + fleet.row_s[at] * num_rows)
        assert fleet.base_s[at] + fleet.row_s[at] * num_rows == pytest.approx(expected_s)


def test_replicas_of_different_speed_share_what_a_row_adds_relative_to_their_own_steps() -> None:
    slow = StepTimeModel(base_s=0.1, row_s=0.01, error=0.1, num_steps=50, most_rows=1000.0)
    fast = StepTimeModel(base_s=0.01, row_s=0.0, error=0.1, num_steps=50, most_rows=1.0)
    fleet = fleet_of(standing(slow), standing(fast))
    pool_row_prices(fleet)

    assert fleet.row_s[0] == pytest.approx(0.01, rel=0.01)
    assert 0.0005 < fleet.row_s[1] < 0.001, "a tenth of its own step at most, not of the slow one's"
