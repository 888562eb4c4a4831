"""How often a connector's thread polls its transport."""

from __future__ import annotations

import itertools

from kv_transfer.peer.poll_period import FIRST_PERIOD_S, LAST_PERIOD_S, QUIET_PERIOD_S, RESTING_PERIOD_S, PollPeriod

NUM_LOOKS = 40


def test_sleeps_grow_while_nothing_happens_and_are_bounded() -> None:
    period = PollPeriod()

    busy = [period.next_busy_s() for _ in range(NUM_LOOKS)]
    quiet = [period.next_quiet_s() for _ in range(NUM_LOOKS)]

    for sleeps, shortest, longest in (
        (busy, FIRST_PERIOD_S, LAST_PERIOD_S),
        (quiet, QUIET_PERIOD_S, RESTING_PERIOD_S),
    ):
        assert shortest <= sleeps[0] < 1.2 * shortest
        assert all(before <= after for before, after in itertools.pairwise(sleeps))
        assert sleeps[-1] == longest


def test_it_looks_often_again_once_something_happens() -> None:
    period = PollPeriod()
    for _ in range(NUM_LOOKS):
        period.next_busy_s()
        period.next_quiet_s()

    period.restart()

    assert period.next_busy_s() < 1.2 * FIRST_PERIOD_S
    assert period.next_quiet_s() < 1.2 * QUIET_PERIOD_S


def test_rest_after_work_begins_short() -> None:
    period = PollPeriod()
    for _ in range(NUM_LOOKS):
        period.next_quiet_s()

    period.next_busy_s()

    assert period.next_quiet_s() < 1.2 * QUIET_PERIOD_S
