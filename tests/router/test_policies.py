"""The policies as pure functions, and what the pool makes of them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies import make_policy, policy_names
from router.policies.kv_usage import lowest_kv_usage
from router.policies.power_of_two import PowerOfTwo
from router.policies.queued_tokens import fewest_queued_tokens
from router.policies.round_robin import RoundRobin


@dataclass(frozen=True)
class Candidate:
    replica_id: str
    promised_usage: float = 0.0
    queued_tokens: int = 0
    num_queued: int = 0


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        replica_id=st.uuids().map(str),
        promised_usage=st.floats(0, 2),
        queued_tokens=st.integers(0, 9),
        num_queued=st.integers(0, 9),
    ),
    min_size=1,
    max_size=8,
)


@given(candidates=CANDIDATES)
@pytest.mark.parametrize("name", policy_names())
def test_every_policy_chooses_one_of_the_candidates(name: str, candidates: list[Candidate]) -> None:
    assert make_policy(name)(candidates) in candidates


@given(candidates=CANDIDATES)
def test_lowest_usage_is_lowest_and_ignores_the_order(candidates: list[Candidate]) -> None:
    chosen = lowest_kv_usage(candidates)

    assert chosen.promised_usage == min(item.promised_usage for item in candidates)
    assert lowest_kv_usage(candidates[::-1]) == chosen


def test_equal_usage_is_decided_by_the_queue() -> None:
    assert lowest_kv_usage([Candidate("a", 0.5, 0, 3), Candidate("b", 0.5, 0, 2)]).replica_id == "b"


def test_prompts_go_where_fewest_tokens_wait() -> None:
    assert fewest_queued_tokens([Candidate("a", 0.1, 500), Candidate("b", 0.9, 100)]).replica_id == "b"


def test_round_robin_goes_on_with_the_next_name_when_one_is_missing() -> None:
    policy = RoundRobin()
    names = ["a", "b", "c"]

    first = [policy([Candidate(name) for name in names]).replica_id for _ in range(4)]
    after = policy([Candidate("b"), Candidate("c")]).replica_id

    assert (first, after) == (["a", "b", "c", "a"], "b")


def test_power_of_two_never_chooses_the_worst_of_three() -> None:
    policy = PowerOfTwo(random.Random(0))
    candidates = [Candidate("a", 0.1), Candidate("b", 0.5), Candidate("c", 0.9)]

    assert {policy(candidates).replica_id for _ in range(100)} == {"a", "b"}


def test_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="kv_usage"):
        make_policy("best")
