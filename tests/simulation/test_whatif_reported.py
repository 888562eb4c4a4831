"""A running cluster as calibration: the reports of its workers become the simulated machine."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from pydantic import TypeAdapter

from engine.contract.promise import NO_PROMISE, Promise
from engine.contract.step_time import StepTimeModel, StepWork
from engine.scheduler.policy.step_time_fit import StepTimeFit
from router.report.counters import RouterCounters
from router.report.router_report import KnownRouter, RouterReport
from router.report.status import cluster_status
from simulation.cluster import simulate, virtual_cluster
from simulation.layout import Layout, apart, elastic, unified
from simulation.loads import LoadSpec, make_load
from simulation.machine import CPU_CORE, CPU_HOST, GPU, Machine, MachineFileError, RouterModel
from simulation.outcome import figures
from simulation.step_runner import StepNoise, averaged
from simulation.virtual_loop import run_virtually
from simulation.whatif.reported import SKEW_BESIDE_DELAYS, ReportedWorker, reported_calibration

MACHINE = replace(
    CPU_CORE,
    transfer=replace(CPU_CORE.transfer, latency_s=0.006, bytes_per_s=5e8),
    num_blocks=512,
    noise_s=CPU_CORE.step_time.base_s,
    prompt_base_s=1.6 * CPU_CORE.step_time.base_s,
)
SHARED = replace(
    MACHINE,
    shared_step_time=MACHINE.step_time,
    step_time=replace(MACHINE.step_time, base_s=1e-2, prompt_token_s=4.6e-4, prompt_read_s=1.2e-7),
    workers_per_host=2,
)
LOAD = LoadSpec(mix="balanced", shape="steady", rates={"balanced": 2.0}, seconds=20.0)
PROMISE = Promise(ttft_ms=2000.0, itl_ms=100.0)
ROWS = TypeAdapter(list[ReportedWorker])
ROUTER = KnownRouter(
    report=RouterReport(
        router_id="r",
        number=1,
        pid=1,
        created_s=0,
        num_alive=0,
        num_waiting=0,
        counters=RouterCounters(),
        families=(),
        departed={},
    ),
    state="running",
)


def reported_by(layout: Layout, load: LoadSpec = LOAD) -> Sequence[ReportedWorker]:
    """The entries of ``/status`` for the workers of a virtual cluster that has served a load."""

    async def run() -> bytes:
        async with virtual_cluster(layout) as cluster:
            await cluster.send(make_load(load))
            await cluster.rest()
            status = await cluster_status(
                model="virtual",
                routers=[ROUTER],
                forgotten=RouterCounters(),
                pools=cluster.routers[0].role_views(),
                timeout_s=1.0,
            )
            return json.dumps(status["pools"]).encode()

    pools = json.loads(run_virtually(run()))
    return ROWS.validate_python([row for pool in pools.values() for row in pool])


@pytest.mark.parametrize("layout", [apart(1, 2, MACHINE), unified(2, MACHINE)], ids=lambda layout: layout.name)
def test_workers_report_the_machine_that_they_are(layout: Layout) -> None:
    machine = reported_calibration("here", reported_by(layout, replace(LOAD, seconds=60.0))).machine

    assert_like(machine, MACHINE, prices=("base_s", "prompt_token_s"))
    assert machine.shared_step_time is None
    assert machine.noise_s == machine.step_time.base_s
    if layout.prefill.num_workers:
        assert machine.transfer.latency_s == pytest.approx(MACHINE.transfer.latency_s, rel=0.25)
        assert machine.transfer.bytes_per_s == pytest.approx(MACHINE.transfer.bytes_per_s, rel=0.1)
        assert MACHINE.prompt_base_s is not None
        assert machine.prompt_base_s == pytest.approx(MACHINE.prompt_base_s, rel=0.25)
    assert machine.step_noise == pytest.approx(MACHINE.step_noise, rel=0.5)


def test_a_worker_that_did_little_of_some_work_says_nothing_of_its_price() -> None:
    prefill, decode = reported_by(apart(1, 1, MACHINE))
    assert prefill.num_prompt_tokens > decode.num_prompt_tokens > 0.0
    odd_prefill = prefill.model_copy(update={"step_time": replace(prefill.step_time, row_s=9.0, context_token_s=9.0)})
    odd_decode = decode.model_copy(
        update={"step_time": replace(decode.step_time, prompt_token_s=9.0, prompt_read_s=9.0)}
    )

    machine = reported_calibration("here", [odd_prefill, odd_decode]).machine

    assert machine == reported_calibration("here", [prefill, decode]).machine


def test_workers_that_borrow_cores_are_known_alone_and_beside_each_other() -> None:
    machine = reported_calibration("here", reported_by(elastic(2, SHARED, PROMISE))).machine

    assert machine.workers_per_host == 2
    assert machine.step_noise == pytest.approx(SHARED.step_noise, rel=0.5)
    assert_like(machine, SHARED, prices=("base_s", "prompt_token_s"))
    assert machine.shared_step_time is not None
    assert SHARED.shared_step_time is not None
    for name in ("base_s", "prompt_token_s"):
        assert getattr(machine.shared_step_time, name) == pytest.approx(
            getattr(SHARED.shared_step_time, name), rel=0.25
        )


def fitted(machine: Machine, *, seed: int) -> StepTimeModel:
    """What a worker learns of the machine from 900 steps of all kinds."""
    source, fit = random.Random(seed), StepTimeFit()
    noise = StepNoise(
        machine.step_noise,
        skew=machine.step_skew,
        delayed=machine.step_delayed,
        delay=machine.step_delay,
        seed=seed,
    )
    for _ in range(900):
        num_rows, num_prompt = source.randrange(1, 8), source.choice((*[0] * 15, source.randrange(20, 800)))
        work = StepWork(num_rows, num_rows * source.uniform(50, 400), num_prompt, num_prompt**2 / 2)
        seconds = machine.step_time.seconds(work)
        fit.note(work, seconds * float(averaged(noise.next(1), np.array([seconds]), machine.noise_s)[0]))
        noise.use(1)
    return fit.model


@pytest.mark.parametrize(("noise", "delayed"), [(0.1, 0.0), (0.2, 0.0), (0.08, 0.03)])
def test_noise_and_delays_are_as_they_were_seen(noise: float, delayed: float) -> None:
    """Delays that workers count little are part of a mean step."""
    delay = 0.8 if delayed else 0.0
    real = replace(MACHINE, step_noise=noise, step_skew=SKEW_BESIDE_DELAYS, step_delayed=delayed, step_delay=delay)
    row = reported_by(unified(1, MACHINE))[0].model_copy(update={"device": "cpu"})

    found = [
        reported_calibration("here", [row.model_copy(update={"step_time": fitted(real, seed=seed)})]).machine
        for seed in range(8)
    ]

    assert fmean(machine.step_noise for machine in found) == pytest.approx(noise, rel=0.25)
    assert fmean(machine.step_delayed for machine in found) == pytest.approx(delayed, rel=0.35, abs=0.006)
    if delayed:
        assert fmean(machine.step_delay for machine in found) == pytest.approx(delay, rel=0.15)
    for work in (StepWork(3, 700.0), StepWork(1, 200.0, 300.0, 45_000.0)):
        mean_s = fmean(machine.step_time.seconds(work) for machine in found)
        assert mean_s == pytest.approx(real.step_time.seconds(work), rel=0.03)


def test_workers_that_share_a_gpu_are_known_as_those_that_share_cores() -> None:
    workers = reported_by(elastic(2, SHARED, PROMISE))
    on_gpu = [worker.model_copy(update={"num_threads": 0, "shared_gpu": "GPU-a"}) for worker in workers]
    apart_from_it = on_gpu[1].model_copy(update={"shared_gpu": "GPU-b"})

    machine = reported_calibration("here", on_gpu).machine

    assert machine == reported_calibration("here", workers).machine
    assert machine.workers_per_host == 2
    assert reported_calibration("here", [on_gpu[0], apart_from_it]).machine.shared_step_time is None


def assert_like(machine: Machine, real: Machine, *, prices: Sequence[str]) -> None:
    for name in ("kv_bytes_per_token", "block_size", "num_blocks", "max_model_len"):
        assert getattr(machine, name) == getattr(real, name), name
    for name in prices:
        found, expected = getattr(machine.step_time, name), getattr(real.step_time, name)
        assert found == pytest.approx(expected, rel=0.25), name


def test_a_load_is_served_as_by_the_machine_that_reported() -> None:
    layout = unified(2, MACHINE)
    reported = reported_calibration("here", reported_by(layout)).machine
    load = make_load(replace(LOAD, seed=5))

    real, predicted = (
        figures(simulate(unified(2, machine), load).outcomes, PROMISE) for machine in (MACHINE, reported)
    )

    assert predicted.ttft_p50_ms == pytest.approx(real.ttft_p50_ms, rel=0.15)
    assert predicted.itl_p50_ms == pytest.approx(real.itl_p50_ms, rel=0.15)


def test_what_is_usual_on_such_a_device_is_taken_for_what_nobody_reports() -> None:
    workers = reported_by(unified(2, MACHINE))

    on_cpu, on_gpu = (
        reported_calibration("here", [worker.model_copy(update={"device": device}) for worker in workers]).machine
        for device in ("cpu", "cuda")
    )

    assert (on_cpu.transfer, on_cpu.step_skew) == (CPU_HOST.transfer, CPU_HOST.step_skew)
    assert (on_gpu.transfer, on_gpu.router, on_gpu.step_skew) == (GPU.transfer, GPU.router, GPU.step_skew)


def test_requests_wait_as_long_for_a_router_as_its_cores_are_busy_with_a_step() -> None:
    [row] = [worker.model_copy(update={"device": "cpu"}) for worker in reported_by(unified(1, MACHINE))]
    short = replace(row.step_time, base_s=row.step_time.base_s / 100)

    slow, fast = (
        reported_calibration("here", [row.model_copy(update={"step_time": model})]).machine.router
        for model in (row.step_time, short)
    )

    usual = RouterModel()
    assert usual.accept_s < fast.accept_s < 1.05 * usual.accept_s
    assert slow.accept_s == pytest.approx(CPU_HOST.router.accept_s, rel=0.4)
    assert usual.call_s < fast.call_s < 1.2 * usual.call_s < slow.call_s
    assert 0.0 < fast.message_wait_s < 0.2 * usual.message_s < slow.message_wait_s


def test_reads_faster_than_usual_have_a_rate_of_their_own() -> None:
    counters = {"num_transfers": 10.0, "transfer_s": 0.1, "num_bytes": 1e9}
    workers = [
        worker.model_copy(update={"device": "cpu", "counters": worker.counters | counters})
        for worker in reported_by(unified(1, MACHINE))
    ]

    transfer = reported_calibration("here", workers).machine.transfer

    assert transfer.bytes_per_s == pytest.approx(1e10)
    assert transfer.latency_s == 0.0


def test_a_calibration_says_whose_it_is() -> None:
    found = reported_calibration("http://here:8000", reported_by(unified(2, MACHINE)))

    assert found.origin.startswith("2 of http://here:8000, by ")
    assert not found.errors


@pytest.mark.parametrize(
    ("counters", "step_time"),
    [
        ({"num_scheduled_tokens": 320.0, "num_generated_tokens": 20.0}, MACHINE.step_time),
        ({"num_scheduled_tokens": 300.0, "num_generated_tokens": 100.0}, MACHINE.step_time),
        ({"num_scheduled_tokens": 900.0, "num_generated_tokens": 100.0}, StepTimeModel()),
    ],
)
def test_workers_that_have_done_too_little_say_nothing(counters: dict[str, float], step_time: StepTimeModel) -> None:
    (worker,) = reported_by(unified(1, MACHINE))

    with pytest.raises(MachineFileError, match=r"no worker of here has computed 256 tokens of prompts, .* requests"):
        reported_calibration("here", [worker.model_copy(update={"counters": counters, "step_time": step_time})])
    with pytest.raises(MachineFileError):
        reported_calibration("here", [])


def test_layouts_of_such_a_machine_can_be_simulated() -> None:
    machine = reported_calibration("here", reported_by(elastic(2, SHARED, PROMISE))).machine

    for layout in (elastic(2, machine, PROMISE), apart(1, 1, machine), elastic(4, machine, NO_PROMISE)):
        assert not figures(simulate(layout, make_load(replace(LOAD, seconds=4.0))).outcomes, PROMISE).num_failed
