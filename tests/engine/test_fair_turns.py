"""Turns by time: no owner waits for another one's pile, and every item gets a place once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.fair_turns import FairTurns


def begun(turns: FairTurns[str]) -> list[str]:
    found: list[str] = []
    while (item := turns.begin()) is not None:
        found.append(item)
    return found


def test_one_owner_has_all_places() -> None:
    turns: FairTurns[str] = FairTurns(2)
    for name in "abc":
        turns.join(name, owner="one")

    assert begun(turns) == ["a", "b"]
    assert "c" in turns


def test_last_place_is_left_to_others_once_there_are_others() -> None:
    turns: FairTurns[str] = FairTurns(2)
    for name, owner in (("a", "one"), ("b", "one"), ("x", "two")):
        turns.join(name, owner=owner)

    assert begun(turns) == ["a", "x"]
    turns.end("x", used_s=1.0)
    assert begun(turns) == []
    turns.join("y", owner="two")
    assert begun(turns) == ["y"]


def test_whoever_used_least_time_is_next() -> None:
    turns: FairTurns[str] = FairTurns(1)
    for name, owner in (("slow1", "slow"), ("slow2", "slow"), ("quick1", "quick"), ("quick2", "quick")):
        turns.join(name, owner=owner)
    order = []
    for _ in range(4):
        [item] = begun(turns)
        order.append(item)
        turns.end(item, used_s=5.0 if "slow" in item else 0.1)

    assert order == ["slow1", "quick1", "quick2", "slow2"]


def test_newcomer_begins_level_and_who_left_is_forgotten() -> None:
    turns: FairTurns[str] = FairTurns(1)
    turns.join("a", owner="one")
    turns.join("b", owner="one")
    assert begun(turns) == ["a"]
    assert turns.leave("b")
    assert not turns.leave("b")
    turns.join("c", owner="two")
    turns.end("a", used_s=3.0)
    turns.join("d", owner="one")

    assert begun(turns) == ["c"]
    turns.end("c", used_s=0.0)
    assert begun(turns) == ["d"]


OWNERS = st.sampled_from(["one", "two", "three"])


@given(
    num_places=st.integers(1, 3),
    jobs=st.lists(st.tuples(OWNERS, st.floats(0.0, 5.0), st.booleans()), min_size=1, max_size=40),
)
def test_every_item_that_stays_gets_a_place_once_and_no_place_is_given_twice(
    num_places: int, jobs: list[tuple[str, float, bool]]
) -> None:
    turns: FairTurns[int] = FairTurns(num_places)
    running: list[int] = []
    served: set[int] = set()
    left: set[int] = set()

    def begin() -> None:
        while (item := turns.begin()) is not None:
            assert item not in served
            served.add(item)
            running.append(item)
        assert len(running) <= num_places

    for number, (owner, used_s, leaves) in enumerate(jobs):
        turns.join(number, owner=owner)
        begin()
        if leaves and turns.leave(number):
            left.add(number)
        elif len(running) == num_places:
            turns.end(running.pop(0), used_s=used_s)
        begin()
    while running:
        turns.end(running.pop(0), used_s=1.0)
        begin()

    assert served | left == set(range(len(jobs)))
    assert not served & left
    assert len(turns) == 0
