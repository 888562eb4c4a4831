"""The stages that a worker reports while its weights load and afterwards."""

from __future__ import annotations

from cluster.serve.start_report import PREPARING, StartReport, weights_progress


def test_what_comes_behind_the_weights_is_a_stage_of_its_own() -> None:
    told: list[StartReport] = []
    progress = weights_progress("decode", "abc", publish=told.append)

    for done in (10, 1000):
        progress(done, 1000)

    assert [(report.stage, report.done, report.total) for report in told] == [
        ("loading weights", 10, 1000),
        (PREPARING, 0, 0),
    ]
