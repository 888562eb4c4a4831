"""Elastic roles compared with the best fixed layout: the compared loads, and the resulting rows."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from benchmarks.disagg_parts.cells import LEVELS, cells_named
from benchmarks.virtual_cluster import elastic_result, loads_of, main, named_loads, warm_up_load
from engine.contract.promise import Promise
from simulation.capacity import measure_capacity
from simulation.cluster import simulate
from simulation.layout import elastic
from simulation.machine import CPU_CORE, CPU_HOST
from simulation.outcome import figures

PROMISE = Promise(ttft_ms=2000.0, itl_ms=100.0)
LAYOUT = elastic(2, CPU_CORE, PROMISE)
CAPACITY = {"prompt_heavy": 1.0, "balanced": 2.0, "decode_heavy": 2.0}


def arguments(**changes: object) -> argparse.Namespace:
    usual = {"seeds": 2, "load": None, "cell_seconds": 30.0, "warm_up": 5, "machine": CPU_CORE}
    return argparse.Namespace(**{**usual, **changes})


def test_seeds_are_other_draws_of_a_cell_the_first_of_which_is_its_own() -> None:
    (cell,) = cells_named(["mid/balanced/steady"])

    own, other = loads_of(cell, arguments(), CAPACITY, 4)

    assert list(own) == cell.load(CAPACITY, seconds=30.0, scale=4)
    assert [item.at_s for item in own] != [item.at_s for item in other]


def test_workers_that_share_a_host_are_asked_for_what_the_host_can_do() -> None:
    (cell,) = cells_named(["mid/balanced/steady"])

    (load,) = loads_of(cell, arguments(seeds=1, machine=CPU_HOST), CAPACITY, 4)

    assert list(load) == cell.load(CAPACITY, seconds=30.0, scale=2)


def test_load_replaces_the_share_of_the_cell() -> None:
    (cell,) = cells_named(["mid/balanced/steady"])

    (more,) = loads_of(cell, arguments(seeds=1, load=2 * LEVELS["mid"]), CAPACITY, 4)
    (usual,) = loads_of(cell, arguments(seeds=1), CAPACITY, 4)

    assert len(more) == pytest.approx(2 * len(usual), rel=0.3)


def test_a_warm_up_of_no_seconds_has_no_requests() -> None:
    assert warm_up_load(arguments(warm_up=0), CAPACITY, 4) == []
    assert warm_up_load(arguments(), CAPACITY, 4)


def test_regret_is_over_the_best_of_the_same_requests_and_over_the_sums_of_all_seeds() -> None:
    (cell,) = cells_named(["low/balanced/steady"])
    loads = loads_of(cell, arguments(cell_seconds=4.0), CAPACITY, 2)

    first, second, of_all = elastic_result("cell", LAYOUT, CPU_CORE, loads, PROMISE, [])

    for row in (first, second):
        assert row.value == pytest.approx(float(row.detail["goodput"]) / float(row.detail["best_goodput"]))
    sums = [float(first.detail[name]) + float(second.detail[name]) for name in ("goodput", "best_goodput")]
    assert of_all.name == "regret/goodput/workers=2/cell"
    assert of_all.value == pytest.approx(sums[0] / sums[1])


def test_four_workers_compute_steady_long_prompts_in_time() -> None:
    (cell,) = cells_named(["mid/prompt_heavy/steady"])
    args, capacity = arguments(seeds=3, cell_seconds=20.0, warm_up=10), measure_capacity(CPU_CORE)
    layout, warm_up = elastic(4, CPU_CORE, PROMISE), warm_up_load(args, capacity, 4)

    runs = [simulate(layout, load, warm_up=warm_up) for load in loads_of(cell, args, capacity, 4)]

    assert mean(figures(run.outcomes, PROMISE).share_good for run in runs) > 93.0, "as much as the best fixed layout"


def test_many_workers_divide_the_work_while_bursts_of_prompts_come() -> None:
    (cell,) = cells_named(["mid/prompt_heavy/bursts"])
    args, capacity = arguments(cell_seconds=20.0, warm_up=10), measure_capacity(CPU_CORE)
    load, *_ = loads_of(cell, args, capacity, 16)

    run = simulate(elastic(16, CPU_CORE, PROMISE), load, warm_up=warm_up_load(args, capacity, 16))

    assert figures(run.outcomes, PROMISE).share_good > 86.0, "undivided it would be 80"


@pytest.mark.parametrize("options", ["--seeds 2", "--elastic --seeds 2 --trace trace.jsonl", "--routers 2"])
def test_options_that_would_do_nothing_are_refused(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["virtual_cluster", *options.split()])

    with pytest.raises(SystemExit, match="2"):
        main()


def test_a_recorded_load_is_served_by_elastic_roles_too(tmp_path: Path) -> None:
    rows = [{"timestamp": 100 * at, "input_length": 600, "output_length": 5, "hash_ids": [7, at]} for at in range(6)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    args = arguments(trace=trace, trace_requests=5, trace_scale=1, trace_load=0.5)

    ((name, loads),) = named_loads(args, CAPACITY, 2)
    of_seed, of_all = elastic_result(name, LAYOUT, CPU_CORE, loads, PROMISE, [])

    assert [len(load) for load in loads] == [5]
    assert of_all.name == "regret/goodput/workers=2/trace/load=0.5"
    assert of_seed.value == of_all.value > 0


def test_several_routers_are_told_in_the_names() -> None:
    (cell,) = cells_named(["low/balanced/steady"])
    loads = loads_of(cell, arguments(cell_seconds=2.0, seeds=1), CAPACITY, 2)

    rows = elastic_result("cell", replace(LAYOUT, num_routers=3), CPU_CORE, loads, PROMISE, [])

    assert [row.name for row in rows] == [
        "regret/goodput/workers=2/routers=3/cell/seed=1",
        "regret/goodput/workers=2/routers=3/cell",
    ]
