"""Places that several keys share: a single key may have all of them, and no key can keep the others out."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.key_shares import KeyShares


def take(shares: KeyShares[int], owner: str, numbers: count[int]) -> int:
    """Take as many places as an owner gets, one by one."""
    taken = 0
    while shares.num_left(owner):
        shares.add(next(numbers), owner=owner)
        taken += 1
    return taken


@pytest.mark.parametrize("owner", ["", "the only key"])
def test_one_key_has_all_places(owner: str) -> None:
    shares = KeyShares[int](100)

    assert take(shares, owner, count()) == 100
    assert shares.limit_for(1) == "the limit is 100"


def test_a_flood_of_one_key_leaves_places_to_the_others() -> None:
    shares, numbers = KeyShares[int](100), count()
    assert shares.num_left("calm") == 100

    assert take(shares, "flood", numbers) == 75
    assert shares.limit_for(1) == "the limit is 100, and the remaining places are left to other keys"
    assert take(shares, "calm", numbers) == 19
    assert take(shares, "third", numbers) == 5
    assert shares.num_left("flood") == 0


def test_what_was_given_before_others_came_is_not_taken_back_and_comes_free() -> None:
    shares = KeyShares[int](8)
    assert take(shares, "flood", count()) == 8
    assert shares.num_left("calm") == 0

    for number in range(2):
        shares.discard(number)
        shares.discard(number)

    assert shares.num_left("flood") == 0
    assert shares.num_left("calm") == 2
    assert len(shares) == 6


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_whoever_comes_finds_what_there_is_of_few_places(limit: int) -> None:
    shares = KeyShares[int](limit)
    shares.num_left("a")

    assert (shares.num_left("b") > 0) is (limit > 0)
    assert shares.num_left(None) == limit


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=200), st.integers(0, 20))
def test_never_more_than_there_are_and_a_newcomer_is_let_in_before_whoever_has_more(
    steps: list[tuple[str, bool]], limit: int
) -> None:
    shares, held = KeyShares[int](limit), dict[int, str]()
    for number, (owner, is_coming) in enumerate(steps):
        if is_coming and shares.num_left(owner):
            shares.add(number, owner=owner)
            held[number] = owner
        elif not is_coming and held:
            shares.discard(next(iter(held)))
            del held[next(iter(held))]
        assert sorted(shares) == sorted(held)
        assert len(shares) <= limit
        most = max("abc", key=list(held.values()).count)
        assert shares.num_left("newcomer") >= min(shares.num_left(most), limit - len(held))
