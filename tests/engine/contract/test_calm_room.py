"""How much of each step prompts take that have time to spare."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.step_time import CALM_TIME_SHARE, calm_room_s

SECONDS = st.floats(1e-3, 3.0)


@pytest.mark.behaviour("P1")
def test_p1_prompts_that_are_not_known_to_take_time_are_not_held_back() -> None:
    assert calm_room_s(0.0, 0.01, 0.1, 2.0) == math.inf


@pytest.mark.behaviour("P1")
def test_p1_prompts_that_take_half_of_the_time_left_are_not_in_a_hurry() -> None:
    """A burst of prompts would otherwise cost the streams beside it all of the promised gap, though it is in time."""
    decode_s, gap_s = 0.015, 0.15
    assert decode_s + calm_room_s(2.0, decode_s, gap_s, 4.0) < 2 / 3 * gap_s


@pytest.mark.behaviour("P1")
@given(work_s=SECONDS, decode_s=st.floats(1e-3, 0.1), gap_s=st.floats(1e-3, 0.5), left_s=SECONDS, factor=SECONDS)
def test_p1_prompts_that_have_time_and_streams_wait_as_little_as_both_can(
    work_s: float, decode_s: float, gap_s: float, left_s: float, factor: float
) -> None:
    calm_s = calm_room_s(work_s, decode_s, gap_s, left_s)

    def lasts_s(room_s: float) -> float:
        return work_s * (decode_s + room_s) / room_s

    def waits(room_s: float) -> float:
        return lasts_s(room_s) / left_s + (decode_s + room_s) / gap_s

    if math.isinf(calm_s):
        assert work_s >= CALM_TIME_SHARE * left_s
        return
    assert lasts_s(calm_s) <= CALM_TIME_SHARE * left_s * (1 + 1e-9)
    other_s = factor * calm_s
    if lasts_s(other_s) <= CALM_TIME_SHARE * left_s:
        assert waits(calm_s) <= waits(other_s) * (1 + 1e-9)
