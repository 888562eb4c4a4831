"""The share of its time that a worker gives to prompts."""

from __future__ import annotations

import pytest

from engine.contract.messages import LoadReport
from engine.contract.step_time import StepTimeModel
from router.placement.prompt_share import NEW_WEIGHT, PromptShare


def load(num_prompt_tokens: float) -> LoadReport:
    counters = {"num_scheduled_tokens": num_prompt_tokens + 50.0, "num_generated_tokens": 50.0}
    return LoadReport(counters=counters, step_time=StepTimeModel(prompt_token_s=0.001, error=0.1, num_steps=9))


def test_share_follows_the_prompts_of_each_window() -> None:
    share = PromptShare()
    share.note(load(0.0), 10.0)
    share.note(load(300.0), 10.5)  # within the window: nothing is known yet

    assert share.value == 0.0

    share.note(load(500.0), 11.0)

    assert share.value == pytest.approx(NEW_WEIGHT * 0.5)


def test_a_worker_that_begins_anew_counts_as_idle_for_a_window() -> None:
    share = PromptShare()
    share.note(load(5000.0), 10.0)
    share.note(load(0.0), 12.0)

    assert share.value == 0.0
