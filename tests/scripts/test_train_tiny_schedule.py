"""The training schedule: warm-up, decay, and an end by steps or by time."""

import pytest

from scripts.train_tiny.schedule import Schedule


def test_progress_is_the_share_of_steps_without_a_time_limit() -> None:
    assert Schedule(num_steps=200).progress(50, elapsed_s=1e6) == 0.25


def test_progress_follows_the_clock_where_steps_are_slow() -> None:
    assert Schedule(num_steps=200, max_minutes=10).progress(50, elapsed_s=300) == 0.5


def test_progress_ends_at_one() -> None:
    assert Schedule(num_steps=200, max_minutes=10).progress(250, elapsed_s=0) == 1.0


def test_the_rate_warms_up_then_stays_then_decays() -> None:
    schedule = Schedule(num_steps=1000, num_warmup_steps=10, decay_start=0.5, final_scale=0.01)
    assert schedule.scale(0, 0.0) == pytest.approx(0.1)
    assert schedule.scale(300, 0.3) == 1.0
    assert schedule.scale(750, 0.75) == pytest.approx(0.5)
    assert schedule.scale(999, 1.0) == 0.01
