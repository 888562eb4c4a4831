"""What a worker of another version reports of its load and its steps."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace

from engine.contract.messages import LoadReport
from engine.contract.step_time import StepTimeModel

REPORT = LoadReport(num_waiting=3, is_stalled=True)
MODEL = StepTimeModel(base_s=0.01, row_s=0.001, error=0.1, num_steps=40, core_gain=0.5, delayed=0.02, delay=0.8)


def test_prices_of_a_version_that_counts_no_delays_are_read() -> None:
    told = [getattr(MODEL, item.name) for item in fields(StepTimeModel)]
    read = object.__new__(StepTimeModel)

    read.__setstate__(told[:-2])  # type: ignore[attr-defined]

    assert read == replace(MODEL, delayed=0.0, delay=0.0)
    assert pickle.loads(pickle.dumps(MODEL)) == MODEL


def test_reports_of_a_version_that_tells_less_are_read() -> None:
    told = [getattr(REPORT, item.name) for item in fields(LoadReport)]
    read = object.__new__(LoadReport)

    read.__setstate__(told[:-1])  # type: ignore[attr-defined]

    assert read == REPORT
    assert pickle.loads(pickle.dumps(REPORT)) == REPORT
