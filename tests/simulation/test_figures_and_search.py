"""The figures of a load, and the search for the best fixed layout by them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.promise import Promise
from engine.contract.step_time import StepTimeModel, StepWork
from simulation.capacity import measure_capacity
from simulation.cluster import simulate
from simulation.fit import StepSample, fit_step_time, log_spread
from simulation.layout import Layout, LayoutError, apart, elastic, unified
from simulation.loads import LoadSpec, make_load
from simulation.machine import CPU_CORE, MACHINES, MachineFileError, load_machine
from simulation.outcome import Figures, Outcome, figures, percentile
from simulation.search import best_fixed

PROMISE = Promise(ttft_ms=500.0, itl_ms=100.0)


def outcome(sent_s: float, first_s: float, gap_s: float, num_tokens: int = 11, error: str | None = None) -> Outcome:
    times = [sent_s + first_s + gap_s * number for number in range(num_tokens)]
    return Outcome(sent_s=sent_s, token_times_s=times, num_tokens=num_tokens, error=error)


@pytest.mark.parametrize(
    "first_s, gap_s, error, keeps",
    [(0.4, 0.09, None, True), (0.6, 0.09, None, False), (0.4, 0.11, None, False), (0.4, 0.09, "lost", False)],
)
def test_a_request_is_good_when_it_ended_well_within_both_bounds(
    first_s: float, gap_s: float, error: str | None, keeps: bool
) -> None:
    assert outcome(0.0, first_s, gap_s, error=error).keeps(PROMISE) is keeps


def test_one_long_gap_in_eleven_breaks_no_promise_and_two_do() -> None:
    good, bad = outcome(0.0, 0.1, 0.05, 12), outcome(0.0, 0.1, 0.05, 12)
    good.token_times_s[-1] += 1.0
    bad.token_times_s[-1] += 1.0
    bad.token_times_s[-2] += 0.5

    assert good.keeps(PROMISE)
    assert not bad.keeps(PROMISE)


def test_where_cores_are_shared_fixed_workers_keep_to_their_own_or_have_the_whole_host() -> None:
    machine = replace(CPU_CORE, shared_step_time=replace(CPU_CORE.step_time, base_s=1.0), workers_per_host=2)
    base_s: dict[str, list[float]] = {}

    def judge(layout: Layout) -> Figures:
        pools = (layout.prefill, layout.decode)
        base_s[layout.name] = [pool.machine.step_time.base_s for pool in pools if pool.num_workers]
        assert not any(pool.machine.shares_cores for pool in pools)
        return made_up(layout, 0.5)

    best_fixed(2, machine, judge)

    alone_s = CPU_CORE.step_time.base_s
    assert base_s == {
        "unified_2": [1.0],
        "unified_2_chunk_128": [1.0],
        "unified_1": [alone_s],
        "unified_1_chunk_128": [alone_s],
        "apart_1_1": [1.0, 1.0],
    }


def test_figures_of_a_load() -> None:
    outcomes = [outcome(0.0, 0.2, 0.05), outcome(1.0, 0.8, 0.05), outcome(2.0, 0.2, 0.05, error="lost")]

    found = figures(outcomes, PROMISE, busy_s=[1.0, 0.5])

    seconds = 1.8 + 0.5
    assert (found.num_requests, found.num_failed) == (3, 1)
    assert found.goodput == pytest.approx(1.0 / 3)  # one request came a second, and one in three kept the promise
    assert found.ttft_p90_ms == pytest.approx(800.0)
    assert found.itl_p50_ms == pytest.approx(50.0)
    assert found.tokens_per_s == pytest.approx(22 / seconds)
    assert found.utilisation == pytest.approx(100 * 0.75 / seconds)


def test_goodput_is_not_that_the_last_answer_is_short() -> None:
    early, late = ([outcome(0.0, 0.2, 0.05), outcome(1.0, ttft_s, 0.05)] for ttft_s in (0.1, 0.4))

    assert figures(early, PROMISE).goodput == figures(late, PROMISE).goodput == pytest.approx(1.0)
    assert figures(early, PROMISE).seconds < figures(late, PROMISE).seconds


def test_requests_that_came_at_once_have_the_rate_at_which_they_were_served() -> None:
    assert figures([outcome(0.0, 0.2, 0.05)], PROMISE).goodput == pytest.approx(1 / (0.2 + 10 * 0.05))
    assert figures([], PROMISE).goodput == 0.0


def test_no_values_have_no_percentile() -> None:
    assert math.isnan(percentile([], 0.5))


def made_up(layout: Layout, peak: float) -> Figures:
    """Goodput that falls with the distance of the share of prefill workers from ``peak``; unified ones have a half."""
    share = layout.prefill.num_workers / layout.num_workers
    goodput = 0.5 if not layout.prefill.num_workers else 1.0 - abs(share - peak)
    empty = figures([], PROMISE)
    return replace(empty, goodput=goodput, itl_p99_ms=float(layout.decode.chunk))


@given(num_workers=st.sampled_from([4, 16, 64, 256]), peak=st.floats(0.05, 0.95))
def test_the_search_finds_the_best_ratio_with_few_tries(num_workers: int, peak: float) -> None:
    search = best_fixed(num_workers, CPU_CORE, lambda layout: made_up(layout, peak))

    best = max(1.0 - abs(number / num_workers - peak) for number in range(1, num_workers))
    assert search.figures.goodput >= best - (0.0 if num_workers <= 16 else 1 / 32)
    assert len(search.tried) <= 17


def test_of_layouts_with_the_same_goodput_the_one_with_shorter_gaps_is_best() -> None:
    search = best_fixed(2, CPU_CORE, lambda layout: replace(made_up(layout, 0.5), goodput=1.0))

    assert search.best.name == "unified_2_chunk_128"


def test_a_load_of_long_prompts_is_served_best_by_more_prefill_workers_than_one_of_long_answers() -> None:
    capacity = measure_capacity(CPU_CORE)

    def best_ratio(mix: str) -> int:
        rates = {mix: 3.0 * capacity[mix]}
        load = make_load(LoadSpec(mix=mix, shape="steady", rates=rates, seconds=10.0))
        layouts = [apart(number, 4 - number, CPU_CORE) for number in (1, 2, 3)]
        promise = Promise(ttft_ms=2000.0, itl_ms=60.0)
        goodput = [figures(simulate(layout, load).outcomes, promise).goodput for layout in layouts]
        return 1 + goodput.index(max(goodput))

    assert best_ratio("prompt_heavy") > best_ratio("decode_heavy")


def test_layouts_without_anybody_to_decode_are_refused() -> None:
    with pytest.raises(LayoutError, match="at least one decode worker"):
        unified(0, CPU_CORE)
    with pytest.raises(LayoutError, match="at least one worker of each kind"):
        apart(0, 4, CPU_CORE)


TRUE_PRICES = StepTimeModel(
    base_s=0.006, row_s=0.001, context_token_s=2e-6, prompt_token_s=7e-4, prompt_read_s=1e-7, num_steps=1
)


def works(num_steps: int) -> list[StepWork]:
    return [
        StepWork(
            num_rows=number % 7,
            num_context_tokens=(number % 7) * 50 * (number % 5),
            num_prompt_tokens=(number % 3) * 40 * (number % 11),
            num_prompt_reads=(number % 3) * 40 * (number % 11) * 100 * (number % 4),
        )
        for number in range(num_steps)
    ]


def test_prices_are_found_from_the_times_of_steps_though_some_were_delayed() -> None:
    samples = [
        StepSample(work=work, seconds=TRUE_PRICES.seconds(work) * (3.0 if number % 20 == 0 else 1.0))
        for number, work in enumerate(works(400))
    ]

    fitted = fit_step_time(samples)

    for name in ("base_s", "row_s", "context_token_s", "prompt_token_s", "prompt_read_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE_PRICES, name), rel=0.1), name
    assert log_spread(samples, fitted) > 0.1


def test_prices_are_never_negative() -> None:
    samples = [StepSample(work=work, seconds=0.01 / (1 + work.num_rows)) for work in works(100)]

    fitted = fit_step_time(samples)

    assert min(fitted.base_s, fitted.row_s, fitted.context_token_s, fitted.prompt_token_s, fitted.prompt_read_s) >= 0.0


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_is_read_as_it_was_saved(name: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    MACHINES[name].save(file)

    assert load_machine(file) == MACHINES[name]


@pytest.mark.parametrize(
    "before, after, text",
    [
        ('"block_size": 16', '"block_size": "many"', "block_size: Input should be a valid integer"),
        ('"row_s"', '"column_s"', "step_time.column_s is not a key of a machine"),
        ('"num_steps": 1', '"num_steps": 0', "fitted to 0 steps"),
        ('"step_delayed": 0.0', '"step_delayed": 1.5', "step_delayed must be from 0 to below 1, got 1.5"),
        ('"step_delayed": 0.0', '"step_delayed": 0.1', "step_delay must be at least 0.5, got 0.0"),
        ('"message_wait_s": 0.0', '"message_wait_s": -1', "message_wait_s must not be below 0, got -1"),
        ('"name"', "name", "does not describe a machine"),
    ],
)
def test_what_is_wrong_with_a_machine_is_named(before: str, after: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    MACHINES["gpu"].save(file)
    content = file.read_text()
    assert before in content
    file.write_text(content.replace(before, after))

    with pytest.raises(MachineFileError, match=text):
        load_machine(file)


def test_elastic_workers_keep_promises_from_what_they_learnt() -> None:
    load = make_load(LoadSpec(mix="balanced", shape="steady", rates={"balanced": 4.0}, seconds=4.0))
    promise = Promise(ttft_ms=2000.0, itl_ms=100.0)
    layout = elastic(2, CPU_CORE, promise)

    cold, warm = simulate(layout, load), simulate(layout, load, warm_up=load)

    assert len(cold.outcomes) == len(warm.outcomes) == len(load)
    assert all(outcome.error is None for outcome in (*cold.outcomes, *warm.outcomes))
    assert sum(warm.busy_s) < 1.5 * sum(cold.busy_s)
    assert figures(warm.outcomes, promise).share_good == 100.0
