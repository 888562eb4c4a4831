"""Runs that a check of predictions keeps in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.whatif_check import again_rows
from benchmarks.whatif_parts.cases import Measured, read, save
from engine.contract.promise import Promise
from simulation.outcome import Outcome

RUNS = [
    Measured(layout="apart:1+1", case="low/balanced/steady", seconds=8.0, outcomes=[]),
    Measured(
        layout="unified:2",
        case="low/balanced/steady",
        seconds=8.0,
        outcomes=[
            Outcome(sent_s=1.0, token_times_s=[1.5, 1.75], num_tokens=2, promise=Promise(ttft_ms=500.0)),
            Outcome(sent_s=2.0, error="lost"),
        ],
    ),
]


def a_run(*, ttft_s: float, layout: str = "apart:1+1") -> Measured:
    outcome = Outcome(sent_s=1.0, token_times_s=[1.0 + ttft_s, 2.0, 3.0], num_tokens=3)
    return Measured(layout=layout, case="low/balanced/steady", seconds=8.0, outcomes=[outcome])


def test_how_far_two_runs_of_the_same_load_are_from_each_other_is_told() -> None:
    first = [a_run(ttft_s=0.5), a_run(ttft_s=0.4, layout="unified:2")]
    second = [a_run(ttft_s=0.5, layout="unified:2"), a_run(ttft_s=0.4)]

    rows = {row.name: row.value for row in again_rows(first, second, Promise(ttft_ms=2000.0, itl_ms=2000.0))}

    assert rows["again/ttft_p50_ms/mean"] == pytest.approx((20.0 + 25.0) / 2)
    assert rows["again/ttft_p50_ms/worst"] == pytest.approx(25.0)
    assert rows["again/goodput/worst"] == 0.0
    with pytest.raises(SystemExit, match="no run of unified:2"):
        again_rows(first, second[1:], Promise())


def test_they_are_read_as_they_were(tmp_path: Path) -> None:
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for file, run in zip(files, RUNS, strict=True):
        save([run], file)

    assert read(files) == RUNS


@pytest.mark.parametrize("content", ["{}\n", "[1]\n", "nothing\n", '{"layout": "a", "outcomes": [{"sent": 1}]}\n'])
def test_another_file_is_refused_by_its_name(content: str, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text(content)

    with pytest.raises(SystemExit, match=r"other\.jsonl has no measured runs"):
        read([tmp_path / "other.jsonl"])
