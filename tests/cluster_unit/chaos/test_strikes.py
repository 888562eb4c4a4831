"""Whether the faults of a scenario struck, and the messages about those that did not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cluster.chaos.load import Answer, ChaosRequest
from cluster.chaos.report import ChaosReport, FaultRecord, RouterLoss
from cluster.chaos.scenario import BROKEN, MENDING, TOTALS, load_scenario, parse_scenario

ROOT = Path(__file__).parents[3]
SAMPLES = sorted((ROOT / "deploy" / "chaos").glob("*.yaml"))
SHOWN_NOWHERE = {("drain", "prefill")}
"""Where roles are fixed a prefill worker finishes what it has, which no total counts."""

PARTITION, DRAIN = "partition between the workers", "drain decode d"


def fault(what: str, *expects: str, before: dict[str, float] | None = None, **others: Any) -> FaultRecord:
    counted = {**dict.fromkeys(TOTALS, 0.0), **(before or {})}
    return FaultRecord(what=what, began_s=0.0, whole_s=1.0, expects=expects, before=counted, **others)


def report_of(*faults: FaultRecord, must_strike: bool = False, **counted: float) -> ChaosReport:
    report = ChaosReport(scenario="x", faults=list(faults), counted={**dict.fromkeys(TOTALS, 0.0), **counted})
    report.judge_strikes([], must_strike=must_strike)
    return report


def test_fault_that_shows_nowhere_is_warned_of_and_not_all_checks_hold() -> None:
    report = report_of(fault(PARTITION, "failed_loads"))

    assert report.problems == []
    assert report.lines()[-2:] == [
        "  WARNING: no fault struck as expected: partition between the workers: failed_loads did not grow; "
        "use roles: fixed or a larger load",
        "  the checks hold, but no fault struck as expected",
    ]


def test_scenario_that_asks_for_it_fails_where_a_fault_did_not_strike() -> None:
    report = report_of(fault(PARTITION, "failed_loads"), must_strike=True)

    (problem,) = report.problems
    assert "failed_loads did not grow" in problem
    assert report.lines()[-1] == f"  FAILED: {problem}"


def test_fault_struck_where_one_of_the_totals_grew() -> None:
    report = report_of(fault("SIGKILL", "prefill_retries", "local_prefills"), local_prefills=2.0)

    assert "; struck (prefill_retries 0, local_prefills 2)" in report.lines()[1]
    assert report.lines()[-1] == "  all checks hold"


def test_what_grew_before_a_fault_or_from_the_next_of_its_kind_on_is_not_its_own() -> None:
    first = fault(DRAIN, "drain_moves", before={"drain_moves": 2.0})
    other = fault(PARTITION, "failed_loads", before={"drain_moves": 2.0})
    second = fault(DRAIN, "drain_moves", before={"drain_moves": 2.0})

    report = report_of(first, other, second, drain_moves=5.0, failed_loads=1.0)

    assert [item.grew for item in report.faults] == [{"drain_moves": 0.0}, {"failed_loads": 1.0}, {"drain_moves": 3.0}]
    (warning,) = report.warnings
    assert warning.startswith("a fault did not strike as expected: drain")
    assert report.lines()[-1] == "  the checks hold, but not every fault struck as expected"


@pytest.mark.parametrize("num_open", [0, 1])
def test_killed_router_struck_where_requests_broke_with_it(num_open: int) -> None:
    ask = ChaosRequest(prompt=(1,), num_tokens=3)
    broken = Answer(ask=ask, started_s=0.0, event_times_s=[1.0], error="broke", broken_by="connection")
    loss = RouterLoss(asked_s=2.0, gone_s=2.5, num_open=num_open)
    report = ChaosReport(scenario="x", faults=[fault("SIGKILL router", BROKEN, losses=[loss])])

    report.judge_strikes([broken], must_strike=False)

    assert [warning.endswith("; use a larger load") for warning in report.warnings] == [True] * (1 - num_open)


def test_fault_that_expects_nothing_is_not_judged() -> None:
    report = report_of(fault("run true"))

    assert report.lines()[-1] == "  all checks hold"


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_every_fault_of_a_sample_says_where_it_shows(path: Path) -> None:
    faults = [step for step in load_scenario(path).steps if step.name not in MENDING]

    for step in faults:
        role = getattr(getattr(step, step.name), "role", None)
        assert bool(step.expects) != ((step.name, role) in SHOWN_NOWHERE), step.name


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_page_of_faults_says_to_look_where_a_sample_shows(path: Path) -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")]
    places = {
        name for row in rows if len(row) == 7 and f"`{path.stem}`" in row[5] for name in re.findall(r"`(\w+)`", row[4])
    }

    expected = {name for step in load_scenario(path).steps for name in step.expects}

    assert expected - {BROKEN} <= places


def test_what_a_step_expects_stays_with_it_where_it_is_used_again() -> None:
    step = parse_scenario(
        {"name": "x", "steps": [{"partition": "workers", "expects": ["failed_loads"]}]}, where="file"
    ).steps[0]

    assert step.name == "partition"
    assert step.model_dump(exclude_unset=True, by_alias=True) == {"partition": "workers", "expects": ["failed_loads"]}
