"""Workers whose steps only take time: their counts, blocks and hand-overs are as with a model."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.step import SchedulerOutput
from engine.contract.step_time import StepTimeModel, StepWork, prompt_reads
from engine.contract.token_ids import TokenIds
from simulation.cluster import VirtualCluster, simulate, virtual_cluster
from simulation.layout import Layout, apart, unified
from simulation.loads import Arrival
from simulation.machine import CPU_CORE, Machine
from simulation.outcome import Outcome
from simulation.step_runner import Host, VirtualRunner, work_of
from simulation.virtual_loop import run_virtually

STEADY = StepTimeModel(base_s=0.01, row_s=0.001, context_token_s=0.0, prompt_token_s=0.0005, num_steps=1)
SMALL = replace(CPU_CORE, step_time=STEADY, step_noise=0.0, num_blocks=256, max_model_len=512)


def prompt(number: int, num_tokens: int) -> TokenIds:
    return TokenIds.of([(number * 1000 + position) % 30_000 + 1 for position in range(num_tokens)])


def arrivals(*requests: tuple[float, int, int]) -> list[Arrival]:
    """Requests by time, length of the prompt, and length of the output."""
    return [
        Arrival(at_s=at_s, prompt=prompt(number, num_prompt), num_output_tokens=num_output)
        for number, (at_s, num_prompt, num_output) in enumerate(requests)
    ]


def output(*, first: list[int], counts: list[int], samples: list[int], is_decode: bool = False) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=0,
        rows=np.arange(len(first), dtype=np.int32),
        first_positions=np.array(first, np.int32),
        num_scheduled_tokens=np.array(counts, np.int32),
        num_samples=np.array(samples, np.int32),
        is_decode=is_decode,
    )


@pytest.mark.parametrize("is_decode", [True, False])
def test_rows_that_take_one_token_are_told_from_prompts(is_decode: bool) -> None:
    decode = work_of(output(first=[10, 30], counts=[1, 1], samples=[1, 1], is_decode=is_decode))

    assert decode == StepWork(num_rows=2, num_context_tokens=40)


def test_a_prompt_reads_what_is_behind_it_and_half_of_itself() -> None:
    mixed = work_of(output(first=[10, 64, 0], counts=[1, 32, 8], samples=[1, 0, 1]))

    assert mixed == StepWork(
        num_rows=1,
        num_context_tokens=10,
        num_prompt_tokens=40,
        num_prompt_reads=prompt_reads(32, after=64) + prompt_reads(8, after=0),
    )


def test_a_step_takes_the_predicted_time() -> None:
    runner = VirtualRunner(SMALL, lambda: 5.0, host=Host(), max_num_seqs=4)

    step = runner.launch(output(first=[0], counts=[100], samples=[1]))
    step.result()

    assert step.end_s == pytest.approx(5.0 + 0.01 + 100 * 0.0005)
    assert runner.busy_s == pytest.approx(0.01 + 100 * 0.0005)


def test_noise_spreads_the_times_of_steps_and_leaves_their_mean() -> None:
    runner = VirtualRunner(replace(SMALL, step_noise=0.3), lambda: 0.0, host=Host(), max_num_seqs=4)
    for _ in range(4000):
        runner.launch(output(first=[0], counts=[100], samples=[1])).result()

    assert runner.busy_s / 4000 == pytest.approx(0.06, rel=0.03)


def test_first_token_and_gaps_of_a_request_alone_are_its_steps() -> None:
    run = simulate(unified(1, SMALL), arrivals((0.0, 100, 5)))

    (outcome,) = run.outcomes
    router = SMALL.router
    assert outcome.error is None
    assert outcome.ttft_s == pytest.approx(router.accept_s + router.call_s + 0.01 + 100 * 0.0005 + router.message_s)
    assert outcome.gaps_s == pytest.approx([0.011] * 4)


@pytest.mark.parametrize("layout", [unified(1, SMALL), apart(1, 1, SMALL)], ids=lambda layout: layout.name)
def test_choices_of_a_prompt_share_it_and_are_made_side_by_side(layout: Layout) -> None:
    (alone,) = arrivals((0.0, 100, 5))

    (one,) = simulate(layout, [alone]).outcomes
    run = simulate(layout, [replace(alone, other_outputs=(9, 3))])

    (outcome,) = run.outcomes
    assert (outcome.error, outcome.num_tokens, len(outcome.token_times_s)) == (None, 17, 5)
    assert outcome.ttft_s == pytest.approx(one.ttft_s)
    side_by_side_s = one.token_times_s[-1] + 12 * (0.01 + 3 * 0.001) + 0.05
    assert run.virtual_s - run.started_s < side_by_side_s, "the prompt was computed once"


def test_a_prompt_is_computed_in_chunks_beside_running_streams() -> None:
    stream, later = arrivals((0.0, 16, 40), (0.1, 256, 2))

    whole = simulate(unified(1, SMALL), [stream, later]).outcomes
    chunked = simulate(unified(1, SMALL, chunk=32), [stream, later]).outcomes

    assert max(whole[0].gaps_s) > 256 * 0.0005
    assert max(chunked[0].gaps_s) < 0.01 + 2 * 0.001 + 32 * 0.0005
    assert chunked[1].ttft_s > whole[1].ttft_s


def test_workers_of_one_host_slow_each_other_down_while_both_compute() -> None:
    shared = replace(SMALL, shared_step_time=replace(STEADY, base_s=0.03), workers_per_host=2)
    alone, *both = arrivals((0.0, 16, 20), (10.0, 16, 20), (10.0, 16, 20))

    outcomes = simulate(unified(2, shared), [alone, *both]).outcomes

    assert max(outcomes[0].gaps_s) == pytest.approx(0.011)
    assert max(outcomes[1].gaps_s) == max(outcomes[2].gaps_s) == pytest.approx(0.031)


def test_what_is_cached_is_not_computed_again() -> None:
    same = prompt(1, 200)
    first, second = (Arrival(at_s=at_s, prompt=same, num_output_tokens=2) for at_s in (0.0, 5.0))

    outcomes = simulate(apart(2, 2, SMALL), [first, second]).outcomes

    assert outcomes[1].ttft_s < outcomes[0].ttft_s - 150 * 0.0005


def handed_over_times(machine: Machine, *, streamed: bool = False, chunk: int = 512) -> Outcome:
    layout = replace(apart(1, 1, machine, chunk=chunk), streamed=streamed)
    (outcome,) = simulate(layout, arrivals((0.0, 320, 4))).outcomes
    assert outcome.error is None
    return outcome


def test_a_hand_over_takes_as_long_as_its_bytes() -> None:
    slow = replace(SMALL, transfer=replace(SMALL.transfer, bytes_per_s=10e6))
    num_bytes = 320 * SMALL.kv_bytes_per_token

    fast_gap, slow_gap = (handed_over_times(machine).gaps_s[0] for machine in (SMALL, slow))

    assert slow_gap - fast_gap == pytest.approx(num_bytes / 10e6 - num_bytes / SMALL.transfer.bytes_per_s, rel=1e-3)


def test_a_streamed_hand_over_hides_behind_the_prompt() -> None:
    slow = replace(SMALL, transfer=replace(SMALL.transfer, bytes_per_s=40e6))

    plain = handed_over_times(slow, chunk=32)
    streamed = handed_over_times(slow, chunk=32, streamed=True)

    assert streamed.gaps_s[0] < plain.gaps_s[0] / 2
    assert streamed.ttft_s == pytest.approx(plain.ttft_s)


@given(
    requests=st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(2, 300), st.integers(2, 20)), min_size=1, max_size=12),
    num_workers=st.sampled_from([(1, 1), (1, 2), (2, 1), (0, 2)]),
    chunk=st.sampled_from([32, 128]),
    num_blocks=st.sampled_from([128, 160]),
    streamed=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_every_request_gets_its_tokens_and_nothing_is_held_at_the_end(
    requests: list[tuple[float, int, int]],
    num_workers: tuple[int, int],
    chunk: int,
    num_blocks: int,
    streamed: bool,
) -> None:
    machine = replace(SMALL, num_blocks=num_blocks)
    num_prefill, num_decode = num_workers
    layout = apart(num_prefill, num_decode, machine, chunk=chunk) if num_prefill else unified(num_decode, machine)

    async def serve() -> list[Outcome]:
        async with virtual_cluster(replace(layout, streamed=streamed)) as cluster:
            outcomes = await cluster.send(arrivals(*requests))
            await cluster.rest()
            check_rest(cluster)
        return outcomes

    outcomes = run_virtually(serve())

    assert [(outcome.num_tokens, outcome.error) for outcome in outcomes] == [(item[2], None) for item in requests]


def check_rest(cluster: VirtualCluster) -> None:
    """Every block is free, and every lease that was granted ended."""
    for worker in cluster.workers.values():
        worker.core.scheduler.check_integrity()
        load = worker.load
        assert load.num_free_blocks == load.num_blocks
        counts = worker.transfers.leases.counts()
        assert counts.num_granted == counts.num_done + counts.num_aborted + counts.num_expired


@pytest.mark.parametrize("make_layout", [lambda machine: apart(2, 2, machine), lambda machine: unified(4, machine)])
def test_the_same_seed_gives_the_same_run_and_another_one_another(make_layout: object) -> None:
    layout: Layout = make_layout(replace(SMALL, step_noise=0.1))  # type: ignore[operator]
    load = arrivals(*((0.05 * number, 40 + 17 * (number % 9), 3 + number % 7) for number in range(40)))

    first, second, other = (simulate(layout, load, seed=seed).outcomes for seed in (1, 1, 2))

    assert first == second
    assert first != other


def test_workers_report_the_time_of_their_steps() -> None:
    async def serve() -> list[tuple[float, float]]:
        async with virtual_cluster(apart(1, 1, SMALL)) as cluster:
            await cluster.send(arrivals((0.0, 100, 30), (0.4, 80, 20)))
            await cluster.rest()
            return [(worker.load.counters["step_s"], worker.runner.busy_s) for worker in cluster.workers.values()]

    for told_s, busy_s in run_virtually(serve()):
        assert busy_s > 0.0
        assert told_s == pytest.approx(busy_s)


def test_a_killed_worker_costs_time_and_no_request() -> None:
    async def serve() -> list[Outcome]:
        async with virtual_cluster(apart(1, 2, SMALL)) as cluster:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(cluster.send(arrivals(*((0.0, 64, 60) for _ in range(6)))))
                await asyncio.sleep(0.5)
                cluster.workers["decode-000"].kill()
            return sending.result()

    outcomes = run_virtually(serve())

    assert [outcome.error for outcome in outcomes] == [None] * 6
    assert [outcome.num_tokens for outcome in outcomes] == [60] * 6


def test_a_drained_worker_hands_its_streams_over() -> None:
    async def serve() -> tuple[list[Outcome], float]:
        async with virtual_cluster(apart(1, 2, SMALL)) as cluster:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(cluster.send(arrivals(*((0.0, 64, 200) for _ in range(4)))))
                await asyncio.sleep(0.5)
                await cluster.pools["decode"].drain("decode-000")
                drained_s = asyncio.get_running_loop().time()
            return sending.result(), drained_s

    outcomes, drained_s = run_virtually(serve())

    assert [outcome.num_tokens for outcome in outcomes] == [200] * 4
    assert drained_s < 1.0 < max(outcome.token_times_s[-1] for outcome in outcomes)


def test_a_warm_up_is_served_before_and_does_not_count() -> None:
    same = prompt(1, 200)
    first = Arrival(at_s=0.0, prompt=same, num_output_tokens=2)

    cold = simulate(unified(1, SMALL), [first])
    warm = simulate(unified(1, SMALL), [first], warm_up=[first])

    assert len(warm.outcomes) == 1
    assert warm.outcomes[0].ttft_s < cold.outcomes[0].ttft_s - 150 * 0.0005
    assert sum(warm.busy_s) < sum(cold.busy_s)


def test_source_that_dies_during_a_hand_over_leaves_no_stream_at_the_reader() -> None:
    prompt_s = 4 * (0.01 + 64 * 0.0005)

    async def left(killed_after_s: float) -> int:
        async with virtual_cluster(apart(2, 1, SMALL, chunk=64)) as cluster:
            answer = asyncio.ensure_future(cluster.ask(arrivals((0.0, 256, 4))[0]))
            await asyncio.sleep(killed_after_s)
            for worker in cluster.workers.values():
                if worker.spec.role == "prefill" and worker.transfers.leases.num_live:
                    worker.kill()
            assert (await answer).error is None
            await cluster.rest()
            return sum(len(worker.transfers._streams) for worker in cluster.workers.values() if not worker.is_gone)

    assert [run_virtually(left(prompt_s + late / 5e3)) for late in range(60)] == [0] * 60
