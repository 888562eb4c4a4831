"""Pools that follow the promises, in virtual time: as the best fixed size for less, at rest when the load is."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise

from benchmarks.promise_scaling import attainment, daily_load
from engine.contract.promise import Promise
from router.scaling_rules import PoolBounds, ScalingRules
from simulation.cluster import simulate
from simulation.layout import elastic
from simulation.loads import Arrival, LoadSpec, make_load
from simulation.machine import CPU_CORE
from simulation.scaled import ScaledRun, simulate_scaled, sizes_over_time
from simulation.whatif.source import warm_up_of

PROMISE = Promise(ttft_ms=3000.0, itl_ms=200.0)
START_S = 8.0
TARGET = 0.99
RULES = ScalingRules(
    pools={"prefill": PoolBounds(least=1, most=3), "decode": PoolBounds(least=1, most=3)},
    target=TARGET,
    window_s=30.0,
    hold_s=60.0,
    start_s=START_S,
)


@functools.cache
def daily() -> Sequence[Arrival]:
    return daily_load("prompt_heavy", peak=4.0, low=0.1, period_s=300.0, seconds=600.0)


def scaled(load: Sequence[Arrival], *, first: int = 2) -> ScaledRun:
    return simulate_scaled(elastic(first, CPU_CORE, PROMISE), load, RULES, start_s=START_S, warm_up=warm_up_of(load))


def fixed(load: Sequence[Arrival], number: int) -> tuple[float, float]:
    """The share that a fixed size keeps, and its worker seconds."""
    run = simulate(elastic(number, CPU_CORE, PROMISE), load, warm_up=warm_up_of(load))
    return attainment(run.outcomes, PROMISE), number * (run.virtual_s - run.started_s)


def test_a_load_that_rises_and_falls_is_served_as_by_the_best_fixed_size_for_less() -> None:
    load = daily()
    sizes = {number: fixed(load, number) for number in (3, 4, 5)}
    best = min(number for number, (kept, _) in sizes.items() if kept >= TARGET)
    run = scaled(load)

    assert all(outcome.error is None for outcome in run.outcomes)
    assert attainment(run.outcomes, PROMISE) >= sizes[best][0]
    assert run.worker_s <= 0.8 * sizes[best][1]


def test_each_rise_and_each_fall_is_followed_once_and_explained() -> None:
    run = scaled(daily())
    sizes = [number for _, number in sizes_over_time(run, {"prefill": 1, "decode": 1})]
    turns = [after > before for before, after in pairwise(sizes) if after != before]

    assert sum(before != after for before, after in pairwise(turns)) <= 4
    assert all("requests/s" in note.reason for note in run.notes)


def test_steady_load_rests() -> None:
    spec = LoadSpec(mix="prompt_heavy", shape="steady", rates={"prompt_heavy": 2.4}, seconds=600.0)
    run = scaled(make_load(spec))

    late = [note for note in run.notes if note.changed_at_s - run.started_s > 120.0]
    sizes = [number for _, number in sizes_over_time(run, {"prefill": 1, "decode": 1})]
    assert late == []
    assert not any(after < before for before, after in pairwise(sizes))
