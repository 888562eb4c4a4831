"""The regret matrix: its cells, what it keeps of earlier runs, and how a layout is compared with the others."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.disagg_parts.cells import ALL_CELLS, cells_named, regret_rows
from benchmarks.disagg_parts.layouts import ELASTIC, FIXED, ONE_SMALL, TWO, matrix_settings
from benchmarks.disagg_parts.matrix import is_placed, parse_capacity, placed_rows, served_per_s, worker_rows
from benchmarks.disagg_parts.pictures import table
from benchmarks.load import Timing
from benchmarks.report import Row, kept_rows, publish
from cluster.config.config import BatonConfig

CAPACITY = {"prompt_heavy": 2.0, "balanced": 4.0, "decode_heavy": 3.0}
ARGS = argparse.Namespace(small_chunk=128, ttft_limit_ms=2000.0, itl_limit_ms=100.0)


def test_there_are_27_cells_and_patterns_choose_among_them() -> None:
    assert len(ALL_CELLS) == len({cell.name for cell in ALL_CELLS}) == 27
    assert [cell.name for cell in cells_named(["low/*/steady", "saturated/balanced/step"])] == [
        "low/prompt_heavy/steady",
        "low/balanced/steady",
        "low/decode_heavy/steady",
        "saturated/balanced/step",
    ]
    with pytest.raises(SystemExit, match="--cells high/\\*/\\* matches no cell"):
        cells_named(["high/*/*"])


def test_reasons_of_an_earlier_run_do_not_stay_beside_those_of_a_new_one() -> None:
    cell = "low/balanced/steady"
    (row,) = placed_rows(ELASTIC, cell, {}, {"apart": 3.0})

    assert is_placed(row.name, [ELASTIC], [cell])
    assert not is_placed(row.name, [TWO], [cell])
    assert not is_placed(row.name, [ELASTIC], ["mid/balanced/steady"])
    assert not is_placed(f"{ELASTIC}/goodput/{cell}", [ELASTIC], [cell])


def test_a_cell_is_the_same_load_for_every_layout_and_no_two_share_prompts() -> None:
    low, mid = cells_named(["*/balanced/steady"])[:2]

    assert low.load(CAPACITY, seconds=20.0) == low.load(CAPACITY, seconds=20.0)
    prompts = [{arrival.prompt.data for arrival in cell.load(CAPACITY, seconds=20.0)} for cell in (low, mid)]
    assert not prompts[0] & prompts[1]
    assert len(low.load(CAPACITY, seconds=20.0, scale=8.0)) > 4 * len(prompts[0])


def test_every_fixed_layout_is_a_configuration() -> None:
    for name in FIXED:
        BatonConfig.model_validate({"model": "tiny", **matrix_settings(name, ARGS)})
    assert matrix_settings(TWO, ARGS)["decode_replicas"] == 2
    assert matrix_settings(ONE_SMALL, ARGS)["decode"] == {
        "num_threads": 2,
        "scheduler": {"max_num_batched_tokens": 128},
    }


def test_elastic_roles_are_asked_for_where_there_are_any_and_refused_by_name_elsewhere() -> None:
    if "roles" in BatonConfig.model_fields:
        assert matrix_settings(ELASTIC, ARGS)["roles"] == "elastic"
        return
    with pytest.raises(SystemExit, match="the layout elastic needs the setting `roles`"):
        matrix_settings(ELASTIC, ARGS)


def test_regret_is_beside_the_best_goodput_and_the_calmest_of_those_that_come_near_it() -> None:
    values = {
        "elastic/goodput/c": 2.0,
        "elastic/itl_p99_ms/c": 60.0,
        "apart/goodput/c": 1.96,
        "apart/itl_p99_ms/c": 50.0,
        "one/goodput/c": 2.0,
        "one/itl_p99_ms/c": 400.0,
        "two/goodput/c": 1.0,
        "two/itl_p99_ms/c": 20.0,
    }

    goodput, gap = regret_rows(values, layout="elastic", others=FIXED, cells=["c", "unmeasured"])

    assert (goodput.name, goodput.value, goodput.detail["best"]) == ("regret/goodput/c", 1.0, "one")
    assert (gap.name, gap.value, gap.detail["calmest"]) == ("regret/itl_p99/c", 1.2, "apart")


def test_rows_of_earlier_runs_stay_but_for_those_that_were_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"

    def write(*rows: tuple[str, float]) -> None:
        made = [Row(name=name, value=value, unit="x") for name, value in rows]
        publish(made, packages=(), json_file=file, title="test", kept=kept_rows(file))

    write(("a", 1.0), ("b", 2.0))
    write(("b", 3.0), ("c", 4.0))

    assert [(row["name"], row["value"]) for row in json.loads(file.read_text())] == [("a", 1.0), ("b", 3.0), ("c", 4.0)]


def test_what_clients_were_served_a_second() -> None:
    timings = [Timing(sent=float(number), token_times=[number + 2.0]) for number in range(9)]

    assert served_per_s(timings) == pytest.approx(9 / 10.0)
    with pytest.raises(SystemExit, match="give it more --calibrate-seconds"):
        served_per_s(timings[:8])


def test_what_workers_say_of_themselves_is_kept_by_layout_and_role() -> None:
    worker = {"counters": {"num_requests": 3, "step_s": 1.5}, "step_time": {"base_s": 0.01}}

    rows = worker_rows("two", {"pools": {"decode": [worker, worker]}})

    assert {row.name: row.value for row in rows if row.name.endswith("two/decode-1")} == {
        "worker/num_requests/two/decode-1": 3,
        "worker/step_s/two/decode-1": 1.5,
        "worker/base_s/two/decode-1": 0.01,
    }


@pytest.mark.parametrize("entries", [["balanced=2"], ["prompt_heavy=1", "balanced=0", "decode_heavy=1"]])
def test_a_capacity_that_lacks_a_mix_is_refused(entries: list[str]) -> None:
    with pytest.raises(SystemExit, match="name each of prompt_heavy, balanced, decode_heavy once"):
        parse_capacity(entries)


def test_a_capacity_is_read() -> None:
    assert parse_capacity(["prompt_heavy=1", "balanced=2.5", "decode_heavy=3"]) == {
        "prompt_heavy": 1.0,
        "balanced": 2.5,
        "decode_heavy": 3.0,
    }


def test_placements_are_told_by_cell_and_only_those_that_were_made() -> None:
    before, after = {"apart": 3.0, "colocated": 1.0, "split": 0.0}, {"apart": 3.0, "colocated": 5.0, "split": 0.0}

    assert placed_rows(ELASTIC, "low/balanced/steady", before, after) == [
        Row(name="elastic/placed_colocated/low/balanced/steady", value=4.0, unit="requests")
    ]


def test_the_table_has_a_line_for_each_cell_with_the_best_other_layout_and_what_was_done() -> None:
    values: dict[str, float] = {}
    for cell in ALL_CELLS:
        values |= {f"{name}/goodput/{cell.name}": 1.0 for name in (*FIXED, ELASTIC)}
        values |= {f"{TWO}/goodput/{cell.name}": 2.0, f"regret/goodput/{cell.name}": 0.5}
    cell = "mid/balanced/bursts"
    values |= {f"elastic/placed_{reason}/{cell}": number for reason, number in (("apart", 70), ("colocated", 29))}
    values |= {f"elastic/placed_split/{cell}": 1.0, f"elastic/placed_override/{cell}x": 9.0}

    lines = table(values).splitlines()

    assert len(lines) == 2 + len(ALL_CELLS)
    assert "| balanced, mid, bursts | two | 2.00, 1.00 | 0.50 |  | apart 70 %, colocated 29 % |" in lines
