"""`baton whatif`, from its flags to its table and its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app

LOAD = ("--mix", "decode_heavy", "--rate", "2", "--seconds", "3")
PROMISE = ("--ttft-ms", "2000", "--itl-ms", "100")


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["whatif", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_layouts_are_compared_in_a_table_and_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "answer.json"

    text = run(*LOAD, *PROMISE, "--layouts", "unified:2,elastic:2", "--price", "2", "--json-file", str(file))

    assert "unified:2" in text
    assert "elastic:2" in text
    assert "error in the last calibration, mean (worst): ttft p50 6 % (16 %)" in text
    answer = json.loads(file.read_text())
    assert answer["promise"] == {"ttft_ms": 2000.0, "itl_ms": 100.0}
    assert answer["best"] is None
    first, second = answer["layouts"]
    assert (first["layout"], second["layout"]) == ("unified:2", "elastic:2")
    assert first["cost"] == pytest.approx(2 * first["worker_hours"])
    assert answer["calibration"]["errors_percent"]["goodput"]["worst"] == pytest.approx(12.1)


def test_the_search_marks_the_cheapest_layout() -> None:
    text = run(*LOAD, *PROMISE, "--search", "--max-workers", "4")

    assert "cheapest that keeps the promise for 95 % of the requests: " in text
    assert " *" in text


def test_no_figure_is_cut_off_where_the_output_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")

    text = run(*LOAD, "--layouts", "unified:1,apart:1+1", "--calibration", "gpu", "--price", "123456")

    assert "…" not in text
    (title,) = (line.split() for line in text.splitlines() if line.startswith("layout "))
    (row,) = (line.split() for line in text.splitlines() if line.startswith("apart:1+1 "))
    assert (title[-1], len(row)) == ("cost", 10)
    assert float(row[-1]) == pytest.approx(123456 * float(row[-2]), rel=0.5)


def test_a_search_that_finds_nothing_says_so_and_fails() -> None:
    text = run(*LOAD, "--ttft-ms", "0.001", "--search", "--max-workers", "1", code=1)

    assert "no layout of up to 1 workers keeps the promise for 95 % of the requests" in text


def test_pictures_show_what_was_tried(tmp_path: Path) -> None:
    text = run(*LOAD, "--layouts", "unified:1", "--plots", str(tmp_path / "pictures"))

    assert "drawn:" in text
    assert "unified:1" in (tmp_path / "pictures" / "gaps.svg").read_text()


def test_a_machine_that_no_run_was_compared_for_has_no_error() -> None:
    assert "error: unknown" in run(*LOAD, "--layouts", "unified:1", "--calibration", "gpu")


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("--layouts", "unified:1"), "no load is given: use --trace FILE, --recorded URL, or --mix and --rate"),
        (("--mix", "balanced", "--layouts", "unified:1"), "no load is given"),
        ((*LOAD, "--trace", "x", "--layouts", "unified:1"), "--trace cannot be combined with --mix and --rate"),
        ((*LOAD, "--scale", "2", "--layouts", "unified:1"), "--start-s, --speed and --scale need --trace"),
        ((*LOAD,), "no layouts are given"),
        ((*LOAD, "--search", "--layouts", "unified:1"), "--layouts unified:1 cannot be combined: give one of them"),
        ((*LOAD, "--search"), "--search needs a promise"),
        ((*LOAD, *PROMISE, "--search", "--attainment", "95"), "--attainment must be above 0 and at most 1, got 95.0"),
        ((*LOAD, *PROMISE, "--search", "--max-workers", "0"), "--max-workers must be from 1 to 1024, got 0"),
        ((*LOAD, "--layouts", "unified:1", "--itl-ms", "0"), "--itl-ms must be above 0, got 0.0"),
        ((*LOAD, "--layouts", "unified:1", "--price", "-1"), "--price must be 0 or more, got -1.0"),
        ((*LOAD, "--layouts", "unified:1", "--json-file", "no/such/a.json"), "there is no folder no/such"),
        ((*LOAD, "--layouts", "unified:1", "--json-file", "/"), "--json-file / is a folder: name a file"),
        ((*LOAD, "--layouts", "unified:1", "--plots", "/dev/null/x"), "the folder cannot be created: Not a directory"),
        ((*LOAD, "--layouts", "unified:1", "--json-file", "/dev/full"), "/dev/full cannot be written: No space"),
        (
            ("--mix", "balanced", "--rate", "1e308", "--seconds", "5", "--layouts", "unified:1"),
            "a rate of 1e+308 requests a second brings inf requests in 5 s, of which at most 1,000,000 are simulated",
        ),
        (
            (*LOAD, "--layouts", "unified:1", "--load-seed", "-5"),
            "'--load-seed': Input should be greater than or equal to 0",
        ),
        ((*LOAD, "--layouts", "both:1"), "'both:1' is not a layout"),
        ((*LOAD, "--layouts", ""), "no layout is named in ''"),
        ((*LOAD, "--layouts", "unified:1", "--calibration", "a"), "known names: cpu_host, cpu_core"),
        (("--trace", "no-file", "--layouts", "unified:1"), "the trace no-file cannot be read: No such file"),
    ],
)
def test_a_wrong_question_is_one_line_that_says_what_is_wrong(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = " ".join(run(*arguments, code=2).split())

    assert text in output
