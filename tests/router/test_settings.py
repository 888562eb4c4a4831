"""Settings of the router that could not work are refused by name, with the value."""

from __future__ import annotations

import pytest

from router.settings import RouterSettings

SILENCES = ("unresponsive_after_s", "stream_silence_timeout_s")


@pytest.mark.parametrize("name", ["backoff_min_s", "report_period_s", "peer_period_s", "write_timeout_s"])
def test_time_of_zero_is_refused_where_nothing_could_work_with_it(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be more than 0 seconds, got 0"):
        RouterSettings(**{name: 0.0})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["recovery_wait_s", "max_write_delay_s", "retry_after_s", "reading_wait_s"])
def test_time_of_zero_is_taken_where_it_means_not_at_all(name: str) -> None:
    settings = RouterSettings(**{name: 0.0})  # type: ignore[arg-type]

    assert getattr(settings, name) == 0.0


@pytest.mark.parametrize("name", SILENCES)
def test_patience_with_silent_workers_that_is_shorter_than_their_reports_take_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 5.*report_period_s .10.*at least 15"):
        RouterSettings(**{"report_period_s": 10.0, **dict.fromkeys(SILENCES, 60.0), name: 5.0})  # type: ignore[arg-type]


def test_room_for_bodies_that_is_smaller_than_one_may_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_reading_bytes \(99\) is less than max_body_bytes \(100\)"):
        RouterSettings(max_body_bytes=100, max_reading_bytes=99)
