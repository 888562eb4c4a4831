"""F3: how many drafts a step gets, by acceptance and step times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.policy.draft_lengths import (
    NUM_TIMES,
    STEPS_BEFORE_PROBE,
    Acceptance,
    DraftLengths,
    StepTimes,
)

MAX_DRAFTS = 8


class Engine:
    """Steps of which each request has ``MAX_DRAFTS`` drafts, the first ``num_right`` of them right.

    A draft model takes ``draft_s`` for the drafts of each place; None: there is none.
    """

    def __init__(
        self, *, num_rows: int, seconds: Callable[[int], float], num_right: int, draft_s: float | None = None
    ) -> None:
        self.now_s = 0.0
        self.num_rows = num_rows
        self.seconds = seconds
        self.num_right = num_right
        self.draft_s = draft_s
        self.num_drafts: list[int] = []
        self.num_output = 0
        self._lengths = DraftLengths(clock=lambda: self.now_s)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    def _step(self) -> None:
        keys = [(str(row), 0) for row in range(self.num_rows)]
        counts = np.zeros(self.num_rows, np.int32)
        if not self._lengths.rests(self.num_rows):
            offered = np.full(self.num_rows, MAX_DRAFTS, np.int32)
            is_by_model = None if self.draft_s is None else np.ones(self.num_rows, np.bool_)
            counts = self._lengths.choose(
                keys, offered, num_tokens=self.num_rows, num_rows=self.num_rows, is_by_model=is_by_model
            )
            assert counts.min() >= 0
            assert counts.max() <= MAX_DRAFTS
            if self.draft_s is not None and counts.any():
                with self._lengths.drafting(int(np.count_nonzero(counts))) as measured:
                    measured.num_steps = int(counts.max())
                    self.now_s += self.draft_s * measured.num_steps
        size = self.num_rows + int(counts.sum())
        self.now_s += self.seconds(size)
        self._lengths.note_step(size, self.seconds(size))
        self.num_output += self.num_rows
        for (name, _), count in zip(keys, counts.tolist(), strict=True):
            if count:
                num_accepted = min(count, self.num_right)
                self.num_output += num_accepted
                self._lengths.note_verified(name, num_drafts=count, num_accepted=num_accepted)
        self.num_drafts.append(int(counts.sum()))


@pytest.mark.behaviour("F3")
def test_f3_all_drafts_are_taken_where_they_cost_nearly_nothing_and_are_right() -> None:
    engine = Engine(num_rows=1, seconds=lambda size: 10.0 + 0.1 * size, num_right=MAX_DRAFTS)

    engine.run(50)

    assert engine.num_drafts[-20:] == [MAX_DRAFTS] * 20


@pytest.mark.behaviour("F3")
def test_f3_drafts_that_are_wrong_are_given_up_and_right_ones_found_again() -> None:
    engine = Engine(num_rows=1, seconds=lambda size: 10.0 + 1.0 * size, num_right=0)

    engine.run(400)
    num_wasted = sum(engine.num_drafts[-200:])
    engine.num_right = MAX_DRAFTS
    engine.run(STEPS_BEFORE_PROBE * 12)

    assert num_wasted <= MAX_DRAFTS * (200 // (STEPS_BEFORE_PROBE) + 1)
    assert engine.num_drafts[-20:] == [MAX_DRAFTS] * 20


@pytest.mark.behaviour("F3")
@settings(deadline=None)
@given(
    num_rows=st.sampled_from([1, 2, 8, 32]),
    per_token_s=st.floats(0.0, 2.0),
    num_right=st.integers(0, MAX_DRAFTS),
    draft_s=st.none() | st.floats(0.0, 1.0),
)
def test_f3_the_output_a_second_is_hardly_ever_less_than_without_drafts(
    num_rows: int, per_token_s: float, num_right: int, draft_s: float | None
) -> None:
    engine = Engine(
        num_rows=num_rows, seconds=lambda size: 1.0 + per_token_s * size, num_right=num_right, draft_s=draft_s
    )
    engine.run(300)
    output, time_s = engine.num_output, engine.now_s

    engine.run(600)

    rate = (engine.num_output - output) / (engine.now_s - time_s)
    assert rate >= 0.97 * num_rows / engine.seconds(num_rows)


@pytest.mark.behaviour("F3")
@pytest.mark.parametrize(("draft_s", "num_drafts"), [(0.0, MAX_DRAFTS), (0.3, 4), (2.0, 0)])
def test_f3_a_draft_model_is_asked_for_as_many_drafts_as_pay_for_its_time(draft_s: float, num_drafts: int) -> None:
    engine = Engine(num_rows=1, seconds=lambda size: 1.0 + 0.01 * size, num_right=4, draft_s=draft_s)

    engine.run(60)

    assert abs(sum(engine.num_drafts[-20:]) / 20 - num_drafts) <= 1


@pytest.mark.behaviour("F3")
def test_f3_the_request_whose_drafts_are_right_gets_them() -> None:
    lengths = DraftLengths()
    for _ in range(20):
        lengths.note_verified("right", num_drafts=4, num_accepted=4)
        lengths.note_verified("wrong", num_drafts=4, num_accepted=0)
    for size in (2, 10):
        lengths.note_step(size, 1.0 + 0.2 * size)

    counts = lengths.choose([("wrong", 0), ("right", 0)], np.array([4, 4], np.int32), num_tokens=2, num_rows=2)

    assert counts.tolist() == [0, 4]


@pytest.mark.behaviour("F3")
def test_f3_better_evidence_is_judged_by_itself() -> None:
    acceptance = Acceptance()
    for number in range(20):
        acceptance.note((str(number), 1), num_drafts=4, num_accepted=0)
        acceptance.note((str(number), 4), num_drafts=4, num_accepted=4)

    assert acceptance.of(("new", 1)) < 0.2
    assert acceptance.of(("new", 4)) > 0.9


@pytest.mark.behaviour("F3")
def test_f3_one_step_that_was_interrupted_changes_no_time() -> None:
    times = StepTimes()
    for _ in range(NUM_TIMES):
        times.note(3, 1.0)

    times.note(3, 50.0)

    assert times.of(np.array([3], np.int32)).tolist() == [1.0]


@pytest.mark.behaviour("F3")
@given(st.lists(st.tuples(st.integers(1, 200), st.floats(0.001, 10.0)), max_size=30))
def test_f3_times_grow_with_the_size_of_a_step(steps: list[tuple[int, float]]) -> None:
    times = StepTimes()
    for size, seconds in steps:
        times.note(size, seconds)

    assert (np.diff(times.of(np.arange(1, 256, dtype=np.int32))) >= 0).all()


@pytest.mark.behaviour("F3")
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=30))
def test_f3_acceptance_is_a_chance_and_new_requests_begin_at_that_of_all(trials: list[tuple[int, int]]) -> None:
    acceptance = Acceptance()
    for num_drafts, num_accepted in trials:
        acceptance.note(("a", 1), num_drafts=num_drafts, num_accepted=min(num_accepted, num_drafts))

    assert 0.0 <= acceptance.of(("a", 1)) <= 1.0
    assert 0.0 <= acceptance.of(("new", 1)) <= 1.0
