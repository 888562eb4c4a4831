"""Benchmarks report what they measured, and fail if they could not measure it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.disagg import mixed_load
from benchmarks.engine import Prompts, Side, alternate
from benchmarks.report import Row
from benchmarks.routing import World, read_trace, with_ratios
from benchmarks.serving import failures
from scripts.fuzz import FuzzError, run_rounds


class Listener:
    """Takes as long as its prompts have tokens, and remembers them."""

    def __init__(self) -> None:
        self.heard: list[Prompts] = []

    def prefill_s(self, prompts: Prompts) -> float:
        self.heard.append(prompts)
        return float(sum(map(len, prompts)))

    def decode_s(self, prompts: Prompts, num_tokens: int) -> float:
        raise AssertionError


def test_no_rate_of_the_mixed_load_brings_a_prompt_that_an_earlier_one_left_in_the_cache() -> None:
    lengths = {
        "stream_prompt_tokens": 32,
        "stream_output_tokens": 8,
        "burst_prompt_tokens": 64,
        "burst_output_tokens": 2,
    }
    args = argparse.Namespace(seconds=20.0, burst_period=2.0, burst_share=1.0, **lengths)

    loads = [mixed_load(0.5, args, part=part) for part in range(3)]

    beginnings = [tuple(arrival.prompt[:16]) for load in loads for arrival in load]
    assert len(set(beginnings)) == len(beginnings)
    assert all({arrival.kind for arrival in load} == {"stream", "burst"} for load in loads)


def test_every_side_gets_the_same_prompts_and_new_ones_in_each_round() -> None:
    ours, theirs = Listener(), Listener()
    sides: dict[str, Side] = {"ours": ours, "theirs": theirs}
    lengths = iter((9, 1, 1, 3, 1, 1, 5, 1, 1, 4, 1, 1))  # of each round's prompts, and of each side's before them
    drawn = ([[token] * length] for token, length in enumerate(lengths))

    medians = alternate(sides, lambda: next(drawn), lambda side, prompts: side.prefill_s(prompts), 3)

    assert ours.heard[1::2] == theirs.heard[1::2] == [[[0] * 9], [[3] * 3], [[6] * 5], [[9] * 4]]
    assert sorted(ours.heard[::2] + theirs.heard[::2]) == [[[token]] for token in (1, 2, 4, 5, 7, 8, 10, 11)]
    assert medians == {"ours": 4.0, "theirs": 4.0}  # the first round does not count


def test_requests_that_failed_fail_the_benchmark() -> None:
    rows = [
        Row(name="ttft_p50_ms/rate=1", value=3.0, unit="ms"),
        Row(name="num_failed/rate=1", value=0.0, unit="requests"),
        Row(name="num_failed/rate=2", value=2.0, unit="requests"),
    ]

    assert failures(rows) == ["2 requests failed: num_failed/rate=2"]


def test_ratio_to_nothing_is_not_made_up() -> None:
    names = ("decode_queueing/random/replicas=4", "decode_queueing/prefix/replicas=4")
    idle, busy = (Row(name=name, value=value, unit="ms") for name, value in zip(names, (0.0, 7.0), strict=True))

    assert all("vs_random" not in row.detail for row in with_ratios([idle, busy]))


def test_replayed_requests_go_to_all_replicas(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 1000 * at, "input_length": 512, "output_length": 32, "hash_ids": [at]} for at in range(4)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    world = World("round_robin", 2, argparse.Namespace(prefill_blocks=64, decode_blocks=(16, 16)))

    world.run(read_trace(trace, 4), 1.0)

    replicas = [*world.prefill.values(), *world.decode.values()]
    assert [len(replica.waits_s) for replica in replicas] == [2, 2, 2, 2]


def test_request_that_never_fits_ends_the_replay_by_name(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": at, "input_length": 1024, "output_length": length, "hash_ids": [at, at + 1]}
        for at, length in ((0, 32), (1000, 32_000))
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    sizes = argparse.Namespace(prefill_blocks=64, decode_blocks=(16, 16))

    with pytest.raises(SystemExit, match=r"d00\d has 1 requests that do not fit into its 16 blocks: raise --decode"):
        World("round_robin", 2, sizes).run(read_trace(trace, 2), 1.0)


def test_fewer_cases_than_asked_for_are_no_success() -> None:
    with pytest.raises(FuzzError, match="20 rounds made 20 cases instead of the requested 5000"):
        run_rounds(lambda number, seed: 1, num_cases=5000, seed=1)
