"""Slots of replicas, and numbers of their hosts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.placement.fleet import Fleet

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
