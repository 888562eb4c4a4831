"""The results of layouts under a load, as `baton whatif` asks for them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.promise import Promise
from engine.contract.token_ids import TokenIds
from simulation.layout import Layout, unified
from simulation.loads import Arrival, LoadError
from simulation.machine import CPU_CORE, GPU, MachineFileError
from simulation.outcome import figures
from simulation.whatif.answer import Question, Verdict, judge_one, judging, with_large_blocks
from simulation.whatif.calibration import FIGURES, PACKAGED, Calibration, FigureError, find_calibration
from simulation.whatif.cheapest import search_cheapest
from simulation.whatif.layouts import layouts_of_size, parse_layouts
from simulation.whatif.parts import Part
from simulation.whatif.plots import draw
from simulation.whatif.recorded import RecordedRequest, RecordedSource
from simulation.whatif.series import Series
from simulation.whatif.source import DescribedSource, TraceSource, warm_up_of

PROMISE = Promise(ttft_ms=2000.0, itl_ms=100.0)
ROOT = Path(__file__).parents[2]


def rows_file(tmp_path: Path, *rows: object) -> Path:
    file = tmp_path / "arrivals.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def plain_row(t: float, prompt_tokens: int, **more: object) -> dict[str, object]:
    return {"t": t, "prompt_tokens": prompt_tokens, "output_tokens": 8, **more}


def test_plain_arrivals_share_what_they_name(tmp_path: Path) -> None:
    file = rows_file(
        tmp_path,
        plain_row(0.5, 100, prefix="a", prefix_tokens=60),
        plain_row(1.5, 80, prefix="a", prefix_tokens=60),
        plain_row(2.0, 80),
    )

    first, second, third = TraceSource(file=file).load()

    assert [(len(arrival.prompt), arrival.at_s) for arrival in (first, second, third)] == [
        (100, 0.5),
        (80, 1.5),
        (80, 2),
    ]
    assert first.prompt.tolist()[:60] == second.prompt.tolist()[:60]
    assert first.prompt.tolist()[60:62] != second.prompt.tolist()[60:62]
    assert second.prompt.tolist()[:2] != third.prompt.tolist()[:2]


def test_requests_of_a_trace_have_their_own_promises(tmp_path: Path) -> None:
    """The second one waits for the first one's prompt, and may."""
    file = rows_file(tmp_path, plain_row(0.0, 600, ttft_ms=1.0), plain_row(0.0, 600, ttft_ms=60_000.0, itl_ms=1e4))
    question = Question(source=TraceSource(file=file), promise=Promise(ttft_ms=500.0, itl_ms=1000.0))

    verdict = judge_one(question, question.source.load(), unified(1, CPU_CORE))

    assert [arrival.promise for arrival in question.source.load()] == [
        Promise(ttft_ms=1.0),
        Promise(ttft_ms=60_000.0, itl_ms=1e4),
    ]
    assert verdict.attainment == 0.5


def test_a_part_of_a_trace_begins_at_zero_and_runs_as_fast_as_asked(tmp_path: Path) -> None:
    file = rows_file(tmp_path, *(plain_row(float(number), 64) for number in range(10)))

    part = TraceSource(file=file, start_s=3.0, seconds=4.0, speed=2.0, scale=4).load()

    assert [arrival.at_s for arrival in part] == [0.0, 0.5, 1.0, 1.5]
    assert {len(arrival.prompt) for arrival in part} == {16}


def mooncake_row(**fields: object) -> dict[str, object]:
    return {"timestamp": 500, "input_length": 600, "output_length": 7, "hash_ids": [1, 2], **fields}


def test_both_forms_of_lines_may_stand_in_a_file(tmp_path: Path) -> None:
    later, earlier = TraceSource(file=rows_file(tmp_path, mooncake_row(), plain_row(0.1, 64))).load()[::-1]

    assert (earlier.at_s, later.at_s, len(later.prompt)) == (0.1, 0.5, 600)


@pytest.mark.parametrize(
    "row, text",
    [
        ({"t": -1, "prompt_tokens": 1, "output_tokens": 1}, "line 2: t: input should be .* equal to 0, got -1"),
        (
            {"t": 0, "prompt_tokens": "many", "output_tokens": 1},
            "prompt_tokens: input .* valid int.*, got 'many'",
        ),
        ({"t": 0, "output_tokens": 1}, "line 2: prompt_tokens is missing"),
        ({"t": 0, "prompt_tokens": 1, "output_tokens": 1, "x": 1}, "line 2: unknown key 'x'; known keys: t, "),
        (plain_row(0, 5, prefix_tokens=3), "prefix_tokens needs prefix"),
        ({**plain_row(0, 5), "output_tokens": 0}, "line 2: output_tokens: input .* equal to 1, got 0"),
        ([1], r"line 2 is '\[1\]', but must be a JSON object such as {\"t\": "),
        ({"timestamp": 5}, "line 2: hash_ids is missing"),
        (mooncake_row(hash_ids=1), "trace: hash_ids must be a list"),
        (mooncake_row(hash_ids=[1, [2]]), "hash_ids must be a list of whole numbers"),
        (mooncake_row(hash_ids=[]), "hash_ids has 0, one for each 512 tokens of the prompt, but input_length is 600"),
        (mooncake_row(input_length=6000), "hash_ids has 2, .* but input_length is 6000"),
        (mooncake_row(input_length=-600), "input_length must be a whole number of tokens, got -600"),
        (mooncake_row(output_length=-1), "output_length must be a whole number of tokens, got -1"),
        (mooncake_row(output_length=True), "output_length must be a whole number of tokens, got True"),
        (mooncake_row(timestamp=-1500), "timestamp must be 0 or more milliseconds, got -1500"),
        (mooncake_row(timestamp=math.nan), "timestamp must be 0 or more milliseconds, got nan"),
        (mooncake_row(timestamp=True), "timestamp must be a number"),
    ],
)
def test_a_line_that_is_no_request_is_named(row: object, text: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=text):
        TraceSource(file=rows_file(tmp_path, plain_row(0, 5), row)).load()


def test_ids_of_a_trace_may_be_whole_hashes(tmp_path: Path) -> None:
    hashes = [2**63 + 11, -5]
    file = rows_file(tmp_path, mooncake_row(hash_ids=hashes), mooncake_row(hash_ids=[hashes[0], 7]))

    first, second = (arrival.prompt.tolist() for arrival in TraceSource(file=file).load())

    assert first[:512] == second[:512]
    assert first[512] != second[512]


@pytest.mark.parametrize(
    ("times", "text"),
    [
        ((1.7e9, 1.7e9 + 3.0), "from second 0 to second 1700000000, .* by --start-s and --seconds"),
        ((5.0, 1e300), "from second 5 to second 1e"),
    ],
)
def test_times_with_days_between_them_are_refused_with_the_way_out(
    times: tuple[float, ...], text: str, tmp_path: Path
) -> None:
    """Such as those of a wall clock: an idle hour takes seconds to simulate, so that these would take forever."""
    file = rows_file(tmp_path, *(plain_row(at_s, 64) for at_s in times))

    with pytest.raises(LoadError, match=text):
        TraceSource(file=file).load()
    part = TraceSource(file=file, start_s=times[0], seconds=10.0).load()
    assert part[0].at_s == 0.0


@pytest.mark.parametrize("text", ["# Baton", "[" * 100_000])
def test_a_file_that_is_no_trace_is_named_with_its_first_line(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "README.md").write_text(text)

    with pytest.raises(LoadError, match=r"README.md: line 1 is '.*', but must be a JSON object such as") as refused:
        TraceSource(file=file).load()

    assert len(str(refused.value)) < 400


def recorded(at_s: float, num_prompt: int, num_cached: int = 0) -> RecordedRequest:
    return RecordedRequest(at_s=at_s, num_prompt_tokens=num_prompt, num_output_tokens=8, num_cached_tokens=num_cached)


def test_recorded_requests_share_what_was_cached_with_the_last_one_that_is_long_enough() -> None:
    requests = [recorded(1000.0, 300), recorded(1001.0, 50), recorded(1002.0, 400, 200), recorded(999.0, 80, 60)]

    oldest, long, short, again = RecordedSource(requests=requests).load()

    assert [arrival.at_s for arrival in (oldest, long, short, again)] == [0.0, 1.0, 2.0, 3.0]
    assert again.prompt.tolist()[:200] == long.prompt.tolist()[:200]
    assert again.prompt[200] != long.prompt[200]
    assert len({arrival.prompt[0] for arrival in (oldest, long, short)}) == 3


def test_a_part_of_recorded_requests_is_taken_as_of_a_trace() -> None:
    source = RecordedSource(requests=[recorded(5.0 + number, 64) for number in range(6)])

    part = replace(source, part=Part(start_s=2.0, seconds=3.0, speed=2.0, scale=4)).load()

    assert [(arrival.at_s, len(arrival.prompt)) for arrival in part] == [(0.0, 16), (0.5, 16), (1.0, 16)]
    with pytest.raises(LoadError, match="recorded 0 requests that ended well"):
        RecordedSource(requests=()).load()


def test_long_prompts_are_simulated_in_large_blocks_of_as_many_tokens_in_all() -> None:
    machine = replace(GPU, num_blocks=24_000)
    (layout, pools, roles) = parse_layouts("unified:2,apart:1+1,elastic:2", machine, PROMISE)
    short, long = ([Arrival(at_s=0.0, prompt=TokenIds.of([1] * size), num_output_tokens=2)] for size in (999, 9000))

    assert with_large_blocks(layout, short) == layout
    assert with_large_blocks(roles, long).prefill.machine.block_size == 64, "119 tokens take a 20th of the gap"
    hasty = replace(roles, promise=Promise(itl_ms=10.0))
    assert with_large_blocks(hasty, long) == hasty
    for pool in (with_large_blocks(layout, long).decode, with_large_blocks(pools, long).prefill):
        assert (pool.machine.block_size, pool.machine.num_blocks) == (128, 3000)


def test_loads_without_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no requests from second 9 on: they leave from second 0 to second 2;"):
        TraceSource(file=rows_file(tmp_path, plain_row(0, 5), plain_row(2, 5)), start_s=9.0).load()
    with pytest.raises(LoadError, match="no requests from second 9 on for 3 s: "):
        TraceSource(file=rows_file(tmp_path, plain_row(0, 5)), start_s=9.0, seconds=3.0).load()
    with pytest.raises(LoadError, match=r"arrivals.jsonl has no requests: write each as a line such as {"):
        TraceSource(file=rows_file(tmp_path)).load()
    with pytest.raises(LoadError, match="brings none in 1 s"):
        DescribedSource(mix="balanced", shape="steady", rate=1e-6, seconds=1.0).load()
    with pytest.raises(LoadError, match="mix must be one of"):
        DescribedSource(mix="odd", shape="steady", rate=1.0, seconds=1.0).load()


def test_a_request_that_no_worker_has_room_for_is_refused_with_what_to_do(tmp_path: Path) -> None:
    question = Question(source=TraceSource(file=rows_file(tmp_path, plain_row(0, 9000))), promise=PROMISE)

    with pytest.raises(LoadError, match=r"9008 tokens.*cpu_core takes 2048.*--scale"), judging(question, CPU_CORE):
        pass
    with judging(question, GPU):
        pass


def test_workers_learn_from_prompts_that_the_load_does_not_have() -> None:
    load = DescribedSource(mix="balanced", shape="steady", rate=3.0, seconds=20.0).load()

    warm_up = warm_up_of(load)

    assert 0 < len(warm_up) < len(load)
    assert all(other.prompt[0] != arrival.prompt[0] for other, arrival in zip(warm_up, load, strict=False))


def test_a_calibration_is_read_as_it_was_saved(tmp_path: Path) -> None:
    kept = Calibration(machine=replace(CPU_CORE, name="mine"), errors={"goodput": FigureError(mean=3.0, worst=9.0)})
    kept.save(tmp_path / "kept.json")
    GPU.save(tmp_path / "machine.json")

    assert find_calibration(str(tmp_path / "kept.json")) == kept
    assert find_calibration(str(tmp_path / "machine.json")) == Calibration(machine=GPU)
    assert find_calibration("cpu_host") is PACKAGED


def test_the_packaged_errors_are_those_of_the_kept_results() -> None:
    rows = {
        row["name"]: row["value"] for row in json.loads((ROOT / "benchmarks/results/whatif_check.json").read_text())
    }

    for name in FIGURES:
        assert PACKAGED.errors[name].mean == pytest.approx(rows[f"{name}/mean"], abs=0.1)
        assert PACKAGED.errors[name].worst == pytest.approx(rows[f"{name}/worst"], abs=0.1)


@pytest.mark.parametrize(
    "before, after, text",
    [
        ('"goodput"', '"speed"', "errors.speed is no figure"),
        ('"mean": 3.0', '"mean": "low"', "errors.goodput.mean: Input should be a valid number"),
        ('"errors"', '"faults"', "faults is not a key of a calibration"),
        ('"block_size": 16', '"block_size": 0', "block_size must be at least 1"),
        ('"machine"', "machine", "is not valid JSON"),
    ],
)
def test_what_is_wrong_with_a_calibration_is_named(before: str, after: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    Calibration(machine=CPU_CORE, errors={"goodput": FigureError(mean=3.0, worst=9.0)}).save(file)
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after))

    with pytest.raises(MachineFileError, match=text):
        find_calibration(str(file))


NO_SERIES = Series(
    window_s=1.0, ttft_p50_ms=[1.0], ttft_p90_ms=[2.0], itl_p50_ms=[1.0], itl_p99_ms=[3.0], utilisation=[50.0]
)


def made_up(layout: Layout, attainment: float) -> Verdict:
    return Verdict(
        layout=layout.name,
        num_workers=layout.num_workers,
        figures=figures([], PROMISE),
        attainment=attainment,
        worker_hours=float(layout.num_workers),
        cost=float(layout.num_workers),
        took_s=0.0,
        series=NO_SERIES,
    )


@given(needed=st.integers(1, 40), max_workers=st.integers(1, 32))
def test_the_search_finds_the_fewest_workers_that_keep_the_promise(needed: int, max_workers: int) -> None:
    sizes: list[int] = []

    def judge(layouts: Sequence[Layout]) -> list[Verdict]:
        sizes.append(layouts[0].num_workers)
        good = f"unified:{layouts[0].num_workers}"
        return [made_up(each, min(1.0, each.num_workers / needed) - 0.1 * (each.name != good)) for each in layouts]

    found = search_cheapest(
        judge, lambda size: layouts_of_size(size, CPU_CORE, PROMISE), attainment=1.0, max_workers=max_workers
    )

    if needed > max_workers:
        assert found.best is None
    else:
        assert found.best is not None
        assert found.best.layout == f"unified:{needed}"
    assert len(sizes) == len(set(sizes)) <= 11


@given(num_workers=st.integers(1, 200))
def test_every_layout_that_the_search_tries_has_the_size(num_workers: int) -> None:
    layouts = layouts_of_size(num_workers, CPU_CORE, PROMISE)

    assert {layout.num_workers for layout in layouts} == {num_workers}
    names = [layout.name for layout in layouts]
    assert len(names) == len(set(names))
    assert (num_workers > 2) == any("mixed" in layout.pools for layout in layouts)


def test_the_search_tries_mixed_workers_beside_every_ratio_of_the_others() -> None:
    names = [layout.name for layout in layouts_of_size(4, CPU_CORE, PROMISE)]

    assert names[-5:] == ["apart:1+3", "apart:2+2", "apart:3+1", "apart:1+2+1", "apart:2+1+1"]


def test_a_run_is_told_in_windows_that_add_up_to_it() -> None:
    source = DescribedSource(mix="balanced", shape="steady", rate=3.0, seconds=5.0)
    question = Question(source=source, promise=PROMISE, price_per_hour=3.0)
    with judging(question, CPU_CORE) as judge:
        (verdict,) = judge(parse_layouts("unified:2", CPU_CORE, PROMISE))

    found, series = verdict.figures, verdict.series
    mean = sum(series.utilisation) * series.window_s / found.seconds
    assert mean == pytest.approx(found.utilisation, rel=0.2)
    assert verdict.worker_hours == pytest.approx(2 * found.seconds / 3600)
    assert verdict.cost == pytest.approx(3.0 * verdict.worker_hours)
    assert len(series.middles_s) == len(series.ttft_p50_ms) == len(series.itl_p99_ms)


def test_verdicts_are_the_same_from_processes_side_by_side() -> None:
    source = DescribedSource(mix="decode_heavy", shape="steady", rate=2.0, seconds=2.0)
    question = Question(source=source, promise=PROMISE)
    layouts = parse_layouts("apart:1+1,elastic:2", CPU_CORE, PROMISE)
    with judging(question, CPU_CORE) as judge, judging(question, CPU_CORE, num_processes=2) as side_by_side:
        alone, together = judge(layouts), side_by_side(layouts)

    assert [verdict.figures for verdict in together] == [verdict.figures for verdict in alone]


def test_pictures_are_drawn_and_the_same_every_time(tmp_path: Path) -> None:
    (layout,) = parse_layouts("unified:2", CPU_CORE, PROMISE)

    first = {file.name: file.read_bytes() for file in draw([made_up(layout, 1.0)], tmp_path / "first")}
    second = {file.name: file.read_bytes() for file in draw([made_up(layout, 1.0)], tmp_path / "second")}

    assert set(first) == {"ttft.svg", "gaps.svg", "utilisation.svg"}
    assert first == second
    assert b"unified:2" in first["ttft.svg"]
