"""What a chaos run counts while routers and workers come and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from cluster.chaos.tally import Tally


def status(
    routers: str, *, moves: float = 0, recomputed: Mapping[str, float] | None = None, of_gone: float = 0
) -> dict[str, Any]:
    """An answer of the routers that are named by letters. Workers by name, those that are gone together."""
    living = recomputed or {}
    rows = [
        {"replica_id": name, "incarnation": f"{name}-1", "counters": {"recomputed_tokens": value} if value else {}}
        for name, value in living.items()
    ]
    return {
        "routers": [{"router_id": name} for name in routers],
        "pools": {"prefill": [], "decode": rows},
        "totals": {"migrations": moves, "recomputed_tokens": sum(living.values()) + of_gone},
    }


def grown(*answers: dict[str, Any]) -> tuple[float, float]:
    tally = Tally(("migrations", "recomputed_tokens"))
    for answer in answers:
        tally.note(answer)
    return tally.counted["migrations"], tally.counted["recomputed_tokens"]


def test_what_was_there_before_is_not_counted() -> None:
    assert grown(
        status("ab", moves=3, recomputed={"w": 100}),
        status("bc", moves=4, recomputed={"w": 102, "new": 5}),
    ) == (1, 7)


def test_worker_that_outlives_all_routers_is_not_counted_from_zero() -> None:
    assert grown(
        status("ab", moves=3, recomputed={"w": 100}),
        status("cd", moves=1, recomputed={"w": 102}),
    ) == (1, 2)


def test_total_that_passed_its_old_value_after_all_routers_went_is_counted_whole() -> None:
    assert grown(status("a", moves=3), status("b", moves=5)) == (5, 0)


def test_worker_that_went_with_all_routers_takes_nothing_from_the_others() -> None:
    assert grown(
        status("a", recomputed={"w": 100, "gone": 50}),
        status("b", recomputed={"w": 101, "new": 4}),
    ) == (0, 5)


def test_worker_that_tells_again_after_a_while_is_not_counted_from_zero() -> None:
    """The new router lists it, and has not reached it yet."""
    assert grown(
        status("a", recomputed={"w": 100}),
        status("b", recomputed={"w": 0}),
        status("b", recomputed={"w": 103}),
    ) == (0, 3)


def test_each_time_that_all_routers_went_adds_up() -> None:
    assert grown(
        status("a", moves=1, recomputed={"w": 10}),
        status("a", moves=3, recomputed={"w": 12}),
        status("b", moves=1, recomputed={"w": 15}),
        status("c", moves=0, recomputed={"w": 15}),
    ) == (3, 5)


def test_routers_that_know_more_and_less_of_the_gone_do_not_add_up() -> None:
    more, less = status("ab", moves=4, of_gone=20), status("ab", moves=3, of_gone=12)

    assert grown(more, less, more, less, more) == (0, 0)


@pytest.mark.parametrize("later", ["abc", "bc"])
def test_router_that_has_just_come_and_knows_nobody_is_no_beginning(later: str) -> None:
    assert grown(
        status("ab", moves=4, recomputed={"w": 7}, of_gone=20),
        status("c", moves=0, recomputed={"w": 7}),
        status(later, moves=5, recomputed={"w": 8}, of_gone=20),
    ) == (1, 1)
