"""Room that owners share: an owner that takes no more than an equal part keeps it, whatever the others do."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fair_shelf import FairShelf

PUTS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 40), st.booleans()), max_size=80)


@given(PUTS, st.integers(1, 12), st.integers(1, 120))
def test_nobody_within_an_equal_part_loses_anything(
    puts: list[tuple[str, int, bool]], max_count: int, max_size: int
) -> None:
    shelf: FairShelf[int, int] = FairShelf(max_count=max_count, max_size=max_size)
    about: dict[int, tuple[str, int]] = {}
    for key, (owner, size, removes_one) in enumerate(puts):
        if removes_one and shelf.num_kept:
            shelf.pop(next(iter(shelf.newest_first())))
        before = list(shelf.newest_first())
        about[key] = (owner, size)
        shelf.put(key, key, owner=owner, size=size)
        after = list(shelf.newest_first())
        if size > max_size:
            assert after == before
            continue

        wanted = [key, *before]
        counts = Counter(about[each][0] for each in wanted)
        sizes = Counter[str]()
        for each in wanted:
            sizes[about[each][0]] += about[each][1]
        for name in counts:
            own = [each for each in wanted if about[each][0] == name]
            if counts[name] * len(counts) <= max_count and sizes[name] * len(counts) <= max_size:
                assert [each for each in after if about[each][0] == name] == own
            else:  # what goes is its oldest
                left = [each for each in after if about[each][0] == name]
                assert left == own[: len(left)]
        assert shelf.num_kept == len(after) <= max_count
        assert shelf.size == sum(about[each][1] for each in after) <= max_size


def test_owners_without_number_take_their_turns() -> None:
    shelf: FairShelf[int, int] = FairShelf(max_count=3)
    for key in range(10):
        shelf.put(key, key, owner=str(key))

    assert list(shelf.newest_first()) == [9, 8, 7]


@pytest.mark.parametrize("num_owners", [1, 200])
def test_what_it_remembers_of_owners_is_bounded(num_owners: int) -> None:
    shelf: FairShelf[int, int] = FairShelf(max_count=100, max_size=1000)
    for key in range(20_000):
        shelf.put(key, key, owner=str(key % num_owners), size=1 + key % 7)

    assert shelf.num_noted <= 1000


def test_same_key_takes_the_place_of_what_it_named() -> None:
    shelf: FairShelf[str, int] = FairShelf(max_count=2, max_size=10)
    shelf.put("x", 1, owner="a", size=9)
    shelf.put("x", 2, owner="b", size=10)

    assert (shelf.get("x"), shelf.num_kept, shelf.size) == (2, 1, 10)
