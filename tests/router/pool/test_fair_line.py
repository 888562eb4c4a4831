"""The queue for the workers' memory: one owner's requests in order, those of several owners in turn."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from router.pool.fair_line import MIN_ENTRIES, FairLine, Place


class Line:
    """A line of names, which numbers those that come."""

    def __init__(self) -> None:
        self.line: FairLine[str] = FairLine()
        self._order = count()

    def join(self, name: str, owner: str = "", *, priority: int = 0, cost: float = 1.0) -> Place[str]:
        return self.line.join(name, owner=owner, priority=priority, order=next(self._order), cost=cost)

    def serve(self) -> str:
        place = self.line.first()
        assert place is not None
        self.line.serve(place)
        return place.item

    def serve_all(self) -> list[str]:
        return [self.serve() for _ in range(len(self.line))]


def test_one_owner_is_served_by_priority_and_arrival() -> None:
    line = Line()
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1), ("e", 0)):
        line.join(name, priority=priority, cost=len(name))

    assert line.serve_all() == ["d", "b", "e", "a", "c"]
    assert line.line.first() is None


def test_a_flood_of_one_owner_does_not_keep_another_waiting() -> None:
    line = Line()
    for number in range(1000):
        line.join(f"flood {number}", "a")
    for _ in range(500):
        line.serve()
    line.join("first", "b")
    line.join("second", "b")

    assert {"first", "second"} < {line.serve() for _ in range(4)}


def test_turns_are_by_what_each_takes() -> None:
    line = Line()
    for number in range(4):
        line.join(f"large {number}", "a", cost=30)
    for number in range(6):
        line.join(f"small {number}", "b", cost=10)

    served = line.serve_all()

    assert served.index("small 2") < served.index("large 1") < served.index("small 5") < served.index("large 3")


def test_smaller_priorities_pass_whosever_they_are() -> None:
    line = Line()
    line.join("ordinary", "b")
    for number in range(3):
        line.join(f"urgent {number}", "a", priority=-1)

    assert line.serve_all() == ["urgent 0", "urgent 1", "urgent 2", "ordinary"]


def test_nobody_saves_turns_up_while_away() -> None:
    line = Line()
    for number in range(100):
        line.join(f"a {number}", "a")
        line.serve()
    for number in range(4):
        line.join(f"a {number}", "a")
        line.join(f"b {number}", "b")

    served = line.serve_all()

    assert [name[0] for name in served].count("b") == 4
    assert abs(served[:4].count("b 0") + served[:4].count("b 1") - 2) <= 1


def test_who_left_was_given_nothing() -> None:
    line = Line()
    for number in range(50):
        line.line.leave(line.join(f"left {number}", "a"))
    line.join("a", "a")
    line.join("b", "b")

    assert line.serve_all() == ["a", "b"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["join", "leave", "serve"]),
            st.sampled_from("abc"),
            st.integers(0, 2),
            st.integers(1, 9),
        ),
        max_size=300,
    )
)
def test_each_is_served_or_leaves_once_and_each_owners_come_in_order(
    steps: list[tuple[str, str, int, int]],
) -> None:
    line, standing, number = Line(), dict[str, Place[str]](), 0
    for what, owner, priority, cost in steps:
        if what == "join":
            number += 1
            name = f"{owner}{number}"
            standing[name] = line.join(name, owner, priority=priority, cost=cost)
        elif what == "leave" and standing:
            line.line.leave(standing.pop(next(reversed(standing))))
        elif what == "serve" and standing:
            served = standing.pop(line.serve())
            own = [place for place in standing.values() if place.owner == served.owner]
            assert all((served.priority, served.order) < (place.priority, place.order) for place in own)
            assert all(served.priority <= place.priority for place in standing.values())
        assert sorted(line.line) == sorted(standing)
        assert len(line.line) == len(standing)


def test_what_is_kept_of_those_who_left_is_bounded() -> None:
    line = Line()
    line.join("waits", "a")
    places = [line.join(f"leaves {number}", "a") for number in range(1000)]
    for place in places:
        line.line.leave(place)
        line.line.leave(place)

    assert sum(map(len, line.line._entries.values())) <= MIN_ENTRIES + 2
    assert line.serve_all() == ["waits"]
