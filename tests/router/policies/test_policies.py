"""The policies as pure functions, and as the pool uses them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies import Ask, make_policy, policy_names
from router.policies.least_loaded import PowerOfTwo, fewest_queued_tokens, lowest_kv_usage
from router.policies.prefix import MAX_USAGE_BONUS, least_usage_with_bonus, least_work
from router.policies.session import home_of, is_overloaded
from router.policies.unaware import RoundRobin
from router.roles import ROLES

ASK = Ask(num_tokens=10)


@dataclass(frozen=True)
class Candidate:
    replica_id: str
    promised_usage: float = 0.0
    queued_tokens: int = 0
    num_queued: int = 0
    num_blocks: int = 100


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
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("name", policy_names())
def test_every_policy_chooses_one_of_the_candidates(name: str, role: str, candidates: list[Candidate]) -> None:
    cached = {item.replica_id: 16 * item.num_queued for item in candidates[::2]}
    assert make_policy(name, ROLES[role])(candidates, Ask(num_tokens=200, cached_tokens=cached)) in candidates


@given(candidates=CANDIDATES)
def test_lowest_usage_is_lowest_and_ignores_the_order(candidates: list[Candidate]) -> None:
    chosen = lowest_kv_usage(candidates, ASK)

    assert chosen.promised_usage == min(item.promised_usage for item in candidates)
    assert lowest_kv_usage(candidates[::-1], ASK) == chosen


def test_equal_usage_is_decided_by_the_queue() -> None:
    assert lowest_kv_usage([Candidate("a", 0.5, 0, 3), Candidate("b", 0.5, 0, 2)], ASK).replica_id == "b"


def test_prompts_go_where_fewest_tokens_wait() -> None:
    assert fewest_queued_tokens([Candidate("a", 0.1, 500), Candidate("b", 0.9, 100)], ASK).replica_id == "b"


def test_round_robin_goes_on_with_the_next_name_when_one_is_missing() -> None:
    policy = RoundRobin()
    names = ["a", "b", "c"]

    first = [policy([Candidate(name) for name in names], ASK).replica_id for _ in range(4)]
    after = policy([Candidate("b"), Candidate("c")], ASK).replica_id

    assert (first, after) == (["a", "b", "c", "a"], "b")


def test_power_of_two_never_chooses_the_worst_of_three() -> None:
    policy = PowerOfTwo(random.Random(0))
    candidates = [Candidate("a", 0.1), Candidate("b", 0.5), Candidate("c", 0.9)]

    assert {policy(candidates, ASK).replica_id for _ in range(100)} == {"a", "b"}


def test_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="kv_usage"):
        make_policy("best", ROLES["decode"])


CACHED_SHARES = st.lists(st.floats(0, 1), min_size=8, max_size=8)


def asked(candidates: list[Candidate], shares: list[float], num_tokens: int = 160) -> Ask:
    cached = {item.replica_id: int(num_tokens * share) for item, share in zip(candidates, shares, strict=False)}
    return Ask(num_tokens=num_tokens, cached_tokens=cached)


@given(candidates=CANDIDATES, shares=CACHED_SHARES)
def test_prefill_by_prefix_is_the_one_that_is_done_first(candidates: list[Candidate], shares: list[float]) -> None:
    ask = asked(candidates, shares)

    chosen = least_work(candidates, ask)

    def work(item: Candidate) -> int:
        return item.queued_tokens + ask.num_tokens - ask.cached_tokens.get(item.replica_id, 0)

    assert work(chosen) == min(map(work, candidates))
    assert least_work(candidates[::-1], ask) == chosen


@given(candidates=CANDIDATES, shares=CACHED_SHARES)
def test_decode_by_prefix_is_never_much_fuller_than_the_emptiest(
    candidates: list[Candidate], shares: list[float]
) -> None:
    chosen = least_usage_with_bonus(candidates, asked(candidates, shares))

    assert chosen.promised_usage <= min(item.promised_usage for item in candidates) + MAX_USAGE_BONUS + 1e-9


@given(candidates=CANDIDATES)
def test_without_anything_cached_prefix_is_load_alone(candidates: list[Candidate]) -> None:
    assert least_work(candidates, ASK) == fewest_queued_tokens(candidates, ASK)
    assert least_usage_with_bonus(candidates, ASK) == lowest_kv_usage(candidates, ASK)


def test_cached_prefix_outweighs_a_shorter_queue_and_a_long_queue_outweighs_it() -> None:
    ask = Ask(num_tokens=1000, cached_tokens={"a": 800})

    assert least_work([Candidate("a", 0.5, 700), Candidate("b", 0.1, 0)], ask).replica_id == "a"
    assert least_work([Candidate("a", 0.5, 900), Candidate("b", 0.1, 0)], ask).replica_id == "b"


@given(candidates=CANDIDATES, session=st.text(min_size=1, max_size=20), gone=st.integers(0, 7))
def test_session_stays_when_another_replica_goes_and_depends_on_no_order(
    candidates: list[Candidate], session: str, gone: int
) -> None:
    home = home_of(candidates, session)
    left = [item for place, item in enumerate(candidates) if place != gone]

    assert home_of(candidates[::-1], session) == home
    if home in left:
        assert home_of(left, session) == home


def test_sessions_spread_over_the_replicas() -> None:
    candidates = [Candidate(f"replica-{number}") for number in range(8)]
    counts = Counter(home_of(candidates, f"session-{number}").replica_id for number in range(800))

    assert len(counts) == 8
    assert max(counts.values()) < 2 * min(counts.values())


@pytest.mark.parametrize(
    ("usage", "queued", "is_over"), [(0.29, 0, False), (0.31, 0, True), (0.1, 50, False), (0.1, 51, True)]
)
def test_home_is_overloaded_by_memory_or_by_queue(usage: float, queued: int, is_over: bool) -> None:
    home, other = Candidate("home", usage, queued), Candidate("other", 0.1)

    assert is_overloaded(home, [home, other], max_usage_lead=0.2, max_queue_lead=50) is is_over
