"""When a pool changes its size: up at once, down only after a hold, and never under a constant load."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.scaling.policy import Need, ScalingPolicy

HOLD_S = 30.0
NUMBERS = st.integers(1, 12)


def play(needs: Sequence[Need], *, begin: int, hold_s: float = HOLD_S) -> list[int]:
    """The sizes behind each look, of which there is one a second."""
    policy = ScalingPolicy(hold_s=hold_s, wanted=begin)
    return [policy.look(need, float(second)) for second, need in enumerate(needs)]


def need(now: int, spare: int = 0) -> Need:
    return Need(now=now, with_margin=now + spare)


@given(NUMBERS, NUMBERS, st.integers(0, 3))
def test_steady_load_is_answered_at_most_once_in_each_direction(begin: int, now: int, spare: int) -> None:
    sizes = play([need(now, spare)] * 200, begin=begin)

    changes = [(before, after) for before, after in pairwise([begin, *sizes]) if before != after]
    assert len(changes) <= 1
    assert sizes[-1] == max(now, min(begin, now + spare))


@given(NUMBERS, st.lists(st.integers(0, 1), min_size=1, max_size=300), NUMBERS)
def test_load_that_wavers_within_the_margin_settles(now: int, wavers: list[int], begin: int) -> None:
    """Up at most once, down at most once: what is enough with a margin is enough for what comes next."""
    sizes = play([Need(now=now + step, with_margin=now + 1) for step in wavers], begin=begin)

    ups = sum(after > before for before, after in pairwise([begin, *sizes]))
    downs = sum(after < before for before, after in pairwise([begin, *sizes]))
    assert ups <= 2
    assert downs <= 1
    assert ups == 0 or downs == 0


@given(st.lists(NUMBERS, min_size=1, max_size=200), NUMBERS)
def test_never_fewer_than_are_needed_now(numbers: list[int], begin: int) -> None:
    for size, number in zip(play([need(number) for number in numbers], begin=begin), numbers, strict=True):
        assert size >= number


@given(st.lists(st.tuples(NUMBERS, st.integers(0, 3)), min_size=1, max_size=200), NUMBERS)
def test_down_only_to_what_was_enough_for_the_whole_hold(looks: list[tuple[int, int]], begin: int) -> None:
    needs = [need(*look) for look in looks]
    sizes = play(needs, begin=begin)

    for second, (before, after) in enumerate(pairwise([begin, *sizes])):
        if after < before:
            held = needs[max(second - int(HOLD_S), 0) : second + 1]
            assert after >= max(item.with_margin for item in held)
            assert second >= HOLD_S


@given(st.lists(NUMBERS, min_size=2, max_size=200), NUMBERS)
def test_changes_down_are_a_hold_apart_from_any_change_before(numbers: list[int], begin: int) -> None:
    sizes = [begin, *play([need(number) for number in numbers], begin=begin)]

    changed_s = 0
    for second, (before, after) in enumerate(pairwise(sizes)):
        if after < before:
            assert second - changed_s >= HOLD_S
        if after != before:
            changed_s = second


@given(st.lists(st.tuples(NUMBERS, st.integers(0, 2)), min_size=1, max_size=150), NUMBERS)
def test_a_larger_need_never_makes_a_smaller_pool_at_once(looks: list[tuple[int, int]], begin: int) -> None:
    """Monotone: the same history and one more worker needed at the end gives at least as many."""
    needs = [need(*look) for look in looks]
    more = [*needs[:-1], Need(now=needs[-1].now + 1, with_margin=needs[-1].with_margin + 1)]

    assert play(more, begin=begin)[-1] >= play(needs, begin=begin)[-1]


def test_who_shrank_too_early_holds_longer_the_next_time() -> None:
    """A load that falls for as long as the hold and comes back: each fall must be longer to be believed."""
    period = [need(3)] * 40 + [need(1)] * 40
    sizes = [3, *play(period * 20, begin=3)]
    shrank_s = [second for second, (before, after) in enumerate(pairwise(sizes)) if after < before]

    assert 1 <= len(shrank_s) <= 3


def test_patience_ends_with_a_fall_that_lasts() -> None:
    wavering = ([need(3)] * 40 + [need(1)] * 40) * 5
    long = int(20 * HOLD_S)
    lasting = ([need(1)] * long + [need(3)] * long) * 2

    assert play([*wavering, *lasting, *[need(1)] * int(HOLD_S + 1)], begin=3)[-1] == 1
