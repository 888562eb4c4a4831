"""Two workers on one host: few streams are served by one of them with all cores, as fast as by a worker alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.contract.promise import NO_PROMISE, Promise
from engine.contract.step_time import StepTimeModel
from engine.contract.token_ids import TokenIds
from simulation.cluster import simulate, virtual_cluster
from simulation.layout import Layout, elastic, unified
from simulation.loads import MIXES, Arrival, LoadSpec, Shape, make_load
from simulation.machine import CPU_HOST, Machine
from simulation.virtual_loop import run_virtually

ALONE = StepTimeModel(base_s=0.008, row_s=2e-4, context_token_s=1e-6, prompt_token_s=3e-4, num_steps=100)
BESIDE = StepTimeModel(base_s=0.014, row_s=3.5e-4, context_token_s=1.8e-6, prompt_token_s=5.5e-4, num_steps=100)
PAIR: Machine = replace(
    CPU_HOST, step_time=ALONE, shared_step_time=BESIDE, step_noise=0.02, transfer=replace(CPU_HOST.transfer, spread=0.0)
)
NUM_REQUESTS = 96


async def closed_loop(layout: Layout, num_clients: int) -> tuple[float, Sequence[float]]:
    """Requests a second of clients that are never idle, and how long each worker computed."""
    spec = LoadSpec(mix="balanced", shape="steady", rates=dict.fromkeys(MIXES, 100.0), seconds=NUM_REQUESTS / 50)
    waiting = iter(make_load(spec)[:NUM_REQUESTS])
    async with virtual_cluster(layout) as cluster:
        loop = asyncio.get_running_loop()
        began_s = loop.time()

        async def keep_asking() -> int:
            num_answers = 0
            for arrival in waiting:
                assert (await cluster.ask(arrival)).error is None
                num_answers += 1
            return num_answers

        num_answers = sum(await asyncio.gather(*(keep_asking() for _ in range(num_clients))))
        return num_answers / (loop.time() - began_s), [worker.runner.busy_s for worker in cluster.workers.values()]


@pytest.mark.parametrize("num_clients", [1, 8])
def test_few_streams_are_as_fast_as_on_one_worker_with_all_cores(num_clients: int) -> None:
    rate, busy_s = run_virtually(closed_loop(elastic(2, PAIR, NO_PROMISE), num_clients))
    alone, _ = run_virtually(closed_loop(unified(1, replace(PAIR, shared_step_time=None)), num_clients))

    assert max(busy_s) > 2 * sum(busy_s) / 3
    assert rate > 0.95 * alone


async def first_tokens(layout: Layout, num_others: int) -> float:
    """Seconds to the first token of a prompt of 1,000 tokens, beside which others come a fifth of a second later."""
    long = Arrival(at_s=0.0, prompt=TokenIds.of(range(1000)), num_output_tokens=1)
    short = Arrival(at_s=0.2, prompt=TokenIds.of(range(2000, 2020)), num_output_tokens=60)
    async with virtual_cluster(layout) as cluster:
        return (await cluster.send([long, *[short] * num_others]))[0].ttft_s


def test_a_prompt_gives_cores_back_while_it_is_computed() -> None:
    quiet = replace(PAIR, step_noise=0.0)
    of_two, of_one = unified(2, quiet), unified(2, replace(quiet, step_time=BESIDE))

    alone_s, shared_s, slow_s = (
        run_virtually(first_tokens(layout, num_others))
        for layout, num_others in ((of_two, 0), (of_two, 1), (of_one, 0))
    )

    given_back = (shared_s - alone_s) / (slow_s - alone_s)
    assert 0.2 < given_back < 0.8, "from then on, and not before"


PROMISE = Promise(ttft_ms=4000.0, itl_ms=150.0)
SLOW = replace(
    PAIR,
    step_time=replace(ALONE, prompt_token_s=7e-4),
    shared_step_time=replace(BESIDE, prompt_token_s=1.4e-3),
    step_noise=0.08,
)
RATES = {"prompt_heavy": 1.6, "balanced": 2.5}
NUM_DRAWS = 8
"""Number of random draws of a load. One draw has only about ten requests, of which the two layouts keep one more or
less by chance.
"""


def kept(layout: Layout, *, shape: Shape, learns: bool = False) -> int:
    """Promises that are kept while long prompts come as fast as they can be computed."""
    before = make_load(LoadSpec(mix="balanced", shape="steady", rates=RATES, seconds=20.0, seed=9)) if learns else ()
    loads = [
        make_load(LoadSpec(mix="prompt_heavy", shape=shape, rates=RATES, seconds=8.0, seed=n)) for n in range(NUM_DRAWS)
    ]
    runs = [simulate(layout, load, seed=number, warm_up=before) for number, load in enumerate(loads)]
    return sum(outcome.keeps(PROMISE) for run in runs for outcome in run.outcomes)


@pytest.mark.parametrize("shape", ["steady", "bursts"])
def test_beside_long_prompts_as_many_promises_are_kept_as_by_one_worker_with_all_cores_and_small_chunks(
    shape: Shape,
) -> None:
    """A worker that took its cores back to keep one more promise made those that waited late, a quarter of all. Where
    far more comes than can be computed, calm steps before it cost a few.
    """
    by_one = kept(unified(1, replace(SLOW, shared_step_time=None), chunk=128), shape=shape)

    assert kept(elastic(2, SLOW, PROMISE), shape=shape, learns=True) >= 0.9 * by_one


def test_without_shared_cores_both_workers_serve() -> None:
    _, busy_s = run_virtually(closed_loop(elastic(2, replace(PAIR, shared_step_time=None), NO_PROMISE), 8))

    assert min(busy_s) > 0.3 * sum(busy_s)
