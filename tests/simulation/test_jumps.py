"""Several decode steps simulated as one have the same result as the single steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.contract.promise import Promise
from engine.contract.step_time import LEAST_DELAY, StepTimeModel
from engine.contract.token_ids import TokenIds
from simulation.cluster import Run, simulate
from simulation.layout import Layout, apart, elastic, unified
from simulation.loads import Arrival, LoadSpec, Shape, make_load
from simulation.machine import CPU_CORE, RouterModel
from simulation.outcome import figures
from simulation.step_runner import StepNoise

MACHINE = replace(
    CPU_CORE,
    step_time=StepTimeModel(
        base_s=0.01, row_s=0.001, context_token_s=1e-6, prompt_token_s=5e-4, prompt_read_s=1e-8, num_steps=1
    ),
    step_noise=0.1,
    step_skew=1.5,
    noise_s=0.02,
    max_model_len=512,
)
SHARED = replace(
    MACHINE,
    shared_step_time=replace(MACHINE.step_time, base_s=0.015, prompt_token_s=8e-4),
    workers_per_host=2,
    transfer=replace(MACHINE.transfer, latency_s=0.004, spread=0.3),
)
DISTURBED: Mapping[str, Any] = {
    "step_delayed": 0.05,
    "step_delay": 0.8,
    "router": RouterModel(message_wait_s=0.003),
}
NANOSECOND = 1e-9


def prompt(number: int, num_tokens: int) -> TokenIds:
    return TokenIds.of([(number * 1000 + position) % 30_000 + 1 for position in range(num_tokens)])


def arrivals(requests: Sequence[tuple[int, int, int, bool]]) -> list[Arrival]:
    """Requests by milliseconds, length of the prompt and of the output, and whether the prompt begins as others do."""
    return [
        Arrival(
            at_s=at_ms / 1e3, prompt=prompt(0 if is_shared else number + 1, num_prompt), num_output_tokens=num_output
        )
        for number, (at_ms, num_prompt, num_output, is_shared) in enumerate(requests)
    ]


def step_by_step(layout: Layout) -> Layout:
    return replace(layout, prefill=replace(layout.prefill, jump=1), decode=replace(layout.decode, jump=1))


def token_times(run: Run) -> list[float]:
    return [time_s for outcome in run.outcomes for time_s in outcome.token_times_s]


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 3000), st.integers(2, 250), st.integers(2, 120), st.booleans()),
        min_size=1,
        max_size=10,
        unique_by=lambda request: request[0],  # who comes first of two that come at once is left to the event loop
    ),
    num_workers=st.sampled_from([(0, 1), (1, 1)]),
    chunk=st.sampled_from([32, 512]),
    num_blocks=st.sampled_from([128, 160, 4096]),
    streamed=st.booleans(),
    is_shared=st.booleans(),
)
@example([(0, 2, 12, False), (121, 111, 2, False), (122, 2, 2, False)], (0, 1), 32, 128, False, False)  # first prices
@settings(max_examples=40, deadline=None)
def test_one_worker_of_a_kind_gives_every_token_at_the_same_time(
    requests: list[tuple[int, int, int, bool]],
    num_workers: tuple[int, int],
    chunk: int,
    num_blocks: int,
    streamed: bool,
    is_shared: bool,
) -> None:
    machine = replace(SHARED if is_shared else MACHINE, num_blocks=num_blocks, **DISTURBED)
    num_prefill, num_decode = num_workers
    layout = apart(num_prefill, num_decode, machine, chunk=chunk) if num_prefill else unified(1, machine, chunk=chunk)
    layout, load = replace(layout, streamed=streamed), arrivals(requests)

    jumping, stepping = simulate(layout, load), simulate(step_by_step(layout), load)

    assert [outcome.num_tokens for outcome in jumping.outcomes] == [request[2] for request in requests]
    assert token_times(jumping) == pytest.approx(token_times(stepping), abs=NANOSECOND)
    assert jumping.busy_s == pytest.approx(stepping.busy_s, abs=NANOSECOND)
    assert jumping.busy_in_s == pytest.approx(stepping.busy_in_s, abs=NANOSECOND)


PROMISE = Promise(ttft_ms=400.0, itl_ms=60.0)


@pytest.mark.parametrize(
    "layout, rate, rel",
    [
        pytest.param(unified(4, MACHINE), 12.0, 0.06, id="unified"),
        pytest.param(apart(2, 3, MACHINE), 12.0, 0.06, id="apart"),
        pytest.param(elastic(4, MACHINE, PROMISE), 12.0, 0.08, id="elastic"),
        # Here a choice that differs changes how fast others are: draws differ by as much.
        pytest.param(elastic(4, SHARED, PROMISE), 6.0, 0.2, id="elastic on shared hosts"),
    ],
)
@pytest.mark.parametrize("shape", ["steady", "bursts"])
def test_several_workers_give_about_the_same_figures(layout: Layout, rate: float, rel: float, shape: Shape) -> None:
    """Routers hear at other times how full workers are and what their steps cost, and may choose another of two that
    are alike.
    """
    spec = LoadSpec(mix="decode_heavy", shape=shape, rates={"decode_heavy": rate}, seconds=20.0)
    load, warm_up = make_load(spec), make_load(replace(spec, seconds=5.0, seed=1))

    jumping, stepping = (
        figures(run.outcomes, PROMISE, busy_s=run.busy_s).values()
        for run in (simulate(which, load, warm_up=warm_up) for which in (layout, step_by_step(layout)))
    )

    for name in ("ttft_p50_ms", "ttft_p90_ms", "itl_p50_ms", "itl_p99_ms", "goodput", "tokens_per_s", "utilisation"):
        assert jumping[name] == pytest.approx(stepping[name], rel=rel), name


@pytest.mark.parametrize("looked_at", [1, 5, 300, 1000])
def test_noise_is_the_same_however_much_of_it_is_looked_at_before_it_is_used(looked_at: int) -> None:
    ahead, one_by_one = (StepNoise(0.2, delayed=0.05, delay=0.8, seed=3) for _ in range(2))
    used: list[float] = []
    while len(used) < 900:
        used.append(float(ahead.next(looked_at)[0]))
        ahead.use(1)

    assert used == [_next(one_by_one) for _ in range(900)]


def test_some_steps_are_delayed_and_the_others_are_as_without() -> None:
    num_steps = 50_000
    usual, delayed = (StepNoise(0.1, delayed=share, delay=0.8, seed=3).next(num_steps) for share in (0.0, 0.03))

    delays = (delayed - usual)[delayed != usual]

    assert len(delays) / num_steps == pytest.approx(0.03, rel=0.1)
    assert delays.min() >= LEAST_DELAY - 1e-9
    assert delays.mean() == pytest.approx(0.8, rel=0.05)


def _next(noise: StepNoise) -> float:
    (factor,) = noise.next(1)
    noise.use(1)
    return float(factor)
