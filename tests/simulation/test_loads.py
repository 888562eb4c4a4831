"""Loads have the requested rates, lengths and shared prefixes."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from simulation.loads import (
    BURST_PERIOD_S,
    BURST_SHARE,
    MIXES,
    SHAPES,
    STEPS_TO,
    Arrival,
    LoadError,
    LoadSpec,
    Shape,
    make_load,
    read_trace,
)

RATES = {"prompt_heavy": 20.0, "balanced": 30.0, "decode_heavy": 40.0}
SECONDS = 80.0


def load_of(mix: str, shape: Shape, *, seed: int = 0) -> list[Arrival]:
    return make_load(LoadSpec(mix=mix, shape=shape, rates=RATES, seconds=SECONDS, seed=seed))


def rate_between(load: list[Arrival], start_s: float, end_s: float) -> float:
    return sum(start_s <= arrival.at_s < end_s for arrival in load) / (end_s - start_s)


@pytest.mark.parametrize("shape", ["steady", "bursts"])
@pytest.mark.parametrize("mix", MIXES)
def test_the_mean_rate_and_the_mean_lengths_are_those_of_the_mix(mix: str, shape: Shape) -> None:
    load = load_of(mix, shape)

    assert rate_between(load, 0.0, SECONDS) == pytest.approx(RATES[mix], rel=0.1)
    assert fmean(len(arrival.prompt) for arrival in load) == pytest.approx(MIXES[mix].num_prompt_tokens, rel=0.05)
    assert fmean(arrival.num_output_tokens for arrival in load) == pytest.approx(MIXES[mix].num_output_tokens, rel=0.05)


def test_bursts_bring_most_requests_in_the_first_part_of_each_period() -> None:
    load = load_of("balanced", "bursts")

    in_bursts = [arrival for arrival in load if arrival.at_s % BURST_PERIOD_S < BURST_SHARE * BURST_PERIOD_S]
    assert len(in_bursts) / len(load) == pytest.approx(0.75, abs=0.05)


@pytest.mark.parametrize("mix", MIXES)
def test_a_step_changes_the_mix_and_its_rate_at_half_of_the_time(mix: str) -> None:
    load, later = load_of(mix, "step"), STEPS_TO[mix].name

    assert {arrival.kind for arrival in load if arrival.at_s < SECONDS / 2} == {mix}
    assert {arrival.kind for arrival in load if arrival.at_s >= SECONDS / 2} == {later}
    assert rate_between(load, 0.0, SECONDS / 2) == pytest.approx(RATES[mix], rel=0.15)
    assert rate_between(load, SECONDS / 2, SECONDS) == pytest.approx(RATES[later], rel=0.15)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_seed_gives_one_load_in_the_order_of_its_times(shape: Shape) -> None:
    first, second, other = (load_of("balanced", shape, seed=seed) for seed in (1, 1, 2))

    assert first == second
    assert first != other
    assert [arrival.at_s for arrival in first] == sorted(arrival.at_s for arrival in first)
    assert len({arrival.prompt.data[:32] for arrival in first}) == len(first)


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"mix": "huge"}, "mix must be one of prompt_heavy, balanced, decode_heavy, got 'huge'"),
        ({"shape": "waves"}, "shape must be one of steady, bursts, step, got 'waves'"),
        ({"seconds": 0.0}, "seconds must be above 0, got 0.0"),
        ({"rates": {"balanced": 1.0}, "shape": "step"}, "the rate of prompt_heavy must be above 0, got None"),
    ],
)
def test_what_makes_no_load_is_refused(wrong: dict[str, object], text: str) -> None:
    asked: dict[str, object] = {"mix": "balanced", "shape": "steady", "rates": RATES, "seconds": 1.0}
    with pytest.raises(LoadError, match=text):
        LoadSpec(**asked | wrong)  # type: ignore[arg-type]


def trace_file(tmp_path: Path, *rows: object) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def trace_row(timestamp: int, hash_ids: list[int], input_length: int) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": input_length, "output_length": 64, "hash_ids": hash_ids}


def test_requests_of_a_trace_share_the_prefixes_that_the_recorded_ones_did(tmp_path: Path) -> None:
    file = trace_file(tmp_path, trace_row(0, [7, 8, 9], 1400), trace_row(2000, [7, 8, 10], 1536))

    first, second = read_trace(file, num_requests=5, speed=4.0, scale=2)

    assert (first.at_s, second.at_s) == (0.0, 0.5)
    assert (len(first.prompt), len(second.prompt)) == (700, 768)
    assert first.prompt.data[: 4 * 512] == second.prompt.data[: 4 * 512]
    assert first.prompt[512] != second.prompt[512]
    assert first.num_output_tokens == 32


def test_a_trace_that_cannot_be_read_says_where(tmp_path: Path) -> None:
    good = trace_row(0, [1], 100)

    with pytest.raises(LoadError, match="No such file"):
        read_trace(tmp_path / "none.jsonl", num_requests=1)
    with pytest.raises(LoadError, match=r"line 2 is not a valid request of a trace: KeyError\('hash_ids'\)"):
        read_trace(trace_file(tmp_path, good, {"timestamp": 1}), num_requests=2)
    with pytest.raises(LoadError, match="scale must divide 512, got 3"):
        read_trace(trace_file(tmp_path, good), num_requests=1, scale=3)
