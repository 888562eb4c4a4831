"""Makes the machine for a simulation from the reports of a running cluster's workers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist, fmean
from typing import Final

from pydantic import BaseModel, Field

from engine.contract.step_time import FIRST_CORE_GAIN, LEAST_DELAY, StepTimeModel
from router.pool.replica import KNOWN_PROMPT_TOKENS
from router.scaling.group import MIN_STREAM_TOKENS
from simulation.machine import CPU_HOST, GPU, Machine, MachineFileError, RouterModel, TransferModel
from simulation.step_runner import mean_noise
from simulation.whatif.calibration import Calibration

KNOWN_TRANSFERS: Final = 8
"""The least number of KV reads from which the time of a read is estimated."""

MESSAGES_OF_READ: Final = 3
"""How many messages a read of KV takes: the request, "done", and its acknowledgement."""

MEAN_OF_DEVIATION: Final = 0.7
"""A worker's mean error, divided by the standard deviation of its noise: 0.8 for normally distributed errors, less
since they are relative to the longer time. Skewed ones are as many times larger as the mean of the skew and its inverse
says.
"""

SHARE_UNSEEN: Final = 0.6
"""Workers count steps that something delayed less. So their prices are lower than those of mean steps, by this power of
the mean noise. Both were found with known prices and noise. Steps with prompts are so long that delays even out.
"""

CALL_WAIT: Final = 0.3
MESSAGE_WAIT: Final = 0.1
"""How much longer calls and messages take than usual where routers wait for the cores on which engines compute, as
shares of a step without requests. From the waterfalls of hand-overs on two cores.
"""

SKEW_BESIDE_DELAYS: Final = 1.3
"""How one-sided the noise of steps on a CPU is apart from the delayed ones, as measured on two cores."""

LEAST_USUAL_ERROR: Final = 0.5
"""The least share of a mean error that delayed steps leave: the mean is of recent steps, and delays of many more."""

NOISE_PASSES: Final = 20

LEAST_SHARE: Final = 0.1
"""Workers that did less of some work than this share of the one that did most do not know its prices: what a prefill
worker takes for the context of its few rows may be many times too much.
"""

LEAST_SPREAD: Final = 0.2
"""How much the bytes of reads must differ, as standard deviation over mean, to tell what each byte takes."""


class ReportedWorker(BaseModel):
    """A row of ``/status`` of a worker that answers, as far as a simulation takes it."""

    node_ip: str
    device: str
    step_time: StepTimeModel
    num_blocks: int = Field(ge=1)
    block_size: int = Field(ge=1)
    block_bytes: int = Field(ge=1)
    max_model_len: int = Field(ge=1)
    num_threads: int
    num_host_cores: int
    borrows_cores: bool
    shared_gpu: str = ""
    counters: dict[str, float]

    @property
    def num_answer_tokens(self) -> float:
        """Tokens that the worker has generated."""
        return self.counters.get("num_generated_tokens", 0.0)

    @property
    def num_prompt_tokens(self) -> float:
        """Prompt tokens that the worker has computed."""
        return self.counters.get("num_scheduled_tokens", 0.0) - self.num_answer_tokens


def reported_calibration(name: str, workers: Sequence[ReportedWorker]) -> Calibration:
    """The calibration of a typical worker of the cluster ``name``. It has no errors, because no run was compared.

    Raises:
        MachineFileError: The workers have computed too little to know how long steps take.
    """
    known = [worker for worker in workers if worker.step_time.num_steps > 0]
    most_prompt = max((worker.num_prompt_tokens for worker in known), default=0.0)
    most_answer = max((worker.num_answer_tokens for worker in known), default=0.0)
    if most_prompt < KNOWN_PROMPT_TOKENS or most_answer < MIN_STREAM_TOKENS:
        raise MachineFileError(
            f"no worker of {name} has computed {KNOWN_PROMPT_TOKENS} tokens of prompts, or none {MIN_STREAM_TOKENS} "
            "tokens of answers, so that the times of its steps are unknown: let it serve some requests first"
        )
    first, own = known[0], _mean_step_time(known)
    typical = CPU_HOST if first.device == "cpu" else GPU
    num_on_host = max(Counter((worker.node_ip, worker.shared_gpu) for worker in workers).values())
    num_own_cores = 1 if first.shared_gpu else first.num_threads
    shares = first.borrows_cores and num_on_host > 1 and num_own_cores > 0
    most_cores = first.num_host_cores / num_own_cores if shares else 1.0
    skew = min(typical.step_skew, SKEW_BESIDE_DELAYS) if own.delayed else typical.step_skew
    noise, delayed = _noise_of(own, skew)
    mean = mean_noise(noise, skew) ** SHARE_UNSEEN
    step_time = _mean_prices(own.on(most_cores), mean)
    slowness = step_time.base_s / own.base_s if own.base_s else 1.0
    machine = Machine(
        name=name,
        step_time=step_time,
        shared_step_time=_mean_prices(own, mean) if shares else None,
        workers_per_host=num_on_host if shares else 1,
        transfer=_transfer(workers, typical.transfer),
        router=_router(typical, step_time),
        step_noise=noise,
        step_skew=skew,
        step_delayed=delayed,
        step_delay=own.delay,
        noise_s=step_time.base_s,
        prompt_base_s=slowness * _prompt_base_s(known),
        loads_within_steps=first.device == "cpu",
        kv_bytes_per_token=max(1, first.block_bytes // first.block_size),
        block_size=first.block_size,
        num_blocks=min(worker.num_blocks for worker in known),
        max_model_len=first.max_model_len,
    )
    origin = f"{len(known)} of {name}, by {own.num_steps} of their steps, predicted within {100 * own.error:.0f} %"
    return Calibration(machine=machine, origin=origin)


def _mean_step_time(workers: Sequence[ReportedWorker]) -> StepTimeModel:
    """Prices on a worker's own cores: means over the workers that know them, weighted by how much work each has done.
    Errors are weighted by steps: that of a worker which made few is 1, as it predicted none.
    """
    models = [worker.step_time.on(1.0) for worker in workers]
    prompts = _weights([worker.num_prompt_tokens for worker in workers])
    answers = _weights([worker.num_answer_tokens for worker in workers])
    gains = [model.core_gain for model in models if model.core_gain is not None]
    num_steps = [model.num_steps for model in models]
    num_delayed = [model.delayed * model.num_steps for model in models]
    return StepTimeModel(
        base_s=fmean([model.base_s for model in models], answers),
        row_s=fmean([model.row_s for model in models], answers),
        context_token_s=fmean([model.context_token_s for model in models], answers),
        prompt_token_s=fmean([model.prompt_token_s for model in models], prompts),
        prompt_read_s=fmean([model.prompt_read_s for model in models], prompts),
        error=fmean([model.error for model in models], num_steps),
        delayed=sum(num_delayed) / sum(num_steps),
        delay=fmean([model.delay for model in models], num_delayed) if any(num_delayed) else 0.0,
        num_steps=sum(num_steps),
        core_gain=fmean(gains) if gains else FIRST_CORE_GAIN,
    )


def _noise_of(model: StepTimeModel, skew: float) -> tuple[float, float]:
    """The ``step_noise`` of a worker, and the share of steps that something delays besides. What usual noise makes of
    long steps depends on it, and what it is depends on how many are left: the two are found in turn.
    """
    delayed, noise = model.delayed, 0.0
    for _ in range(NOISE_PASSES):
        of_delayed = delayed * model.delay / (1.0 + model.delay)
        error = max(model.error - of_delayed, LEAST_USUAL_ERROR * model.error) / (1.0 - delayed)
        noise = error / (MEAN_OF_DEVIATION * (skew + 1.0 / skew) / 2.0)
        usual = NormalDist(sigma=noise * skew).cdf(-math.log1p(LEAST_DELAY)) if noise else 0.0
        delayed = max(model.delayed - usual, 0.0)
    return noise, delayed


def _prompt_base_s(workers: Sequence[ReportedWorker]) -> float:
    """What a step takes before its first token on a worker's own cores, where prompts are computed."""
    bases = [worker.step_time.on(1.0).base_s for worker in workers]
    return fmean(bases, _weights([worker.num_prompt_tokens for worker in workers]))


def _weights(done: Sequence[float]) -> Sequence[float]:
    """How much each worker's prices count, by how much of the priced work it has done."""
    return [amount if amount >= LEAST_SHARE * max(done) else 0.0 for amount in done]


def _mean_prices(model: StepTimeModel, mean: float) -> StepTimeModel:
    """Only the prices, and those of mean steps. The machine says for how many cores they are valid."""
    scaled = model.scaled(reading=mean, computing=mean)
    return replace(
        scaled,
        prompt_token_s=model.prompt_token_s,
        prompt_read_s=model.prompt_read_s,
        cores=1.0,
        core_gain=None,
    )


def _router(typical: Machine, step_time: StepTimeModel) -> RouterModel:
    """The model of routers. What a request waits beyond a router's usual time is taken to be a share of a step, as at
    the typical machine: routers wait for the cores on which engines compute.
    """
    usual, base_s = RouterModel(), step_time.base_s
    if typical.router == usual:
        return usual
    return RouterModel(
        accept_s=usual.accept_s + (typical.router.accept_s - usual.accept_s) * base_s / typical.step_time.base_s,
        call_s=usual.call_s + CALL_WAIT * base_s,
        message_s=usual.message_s,
        message_wait_s=MESSAGE_WAIT * base_s,
    )


def _transfer(workers: Sequence[ReportedWorker], typical: TransferModel) -> TransferModel:
    """The model of reads: what each takes, and each of its bytes. Where all are alike, their bytes come at the usual
    rate, and the rest is latency.
    """

    def total(name: str) -> float:
        return sum(worker.counters.get(name, 0.0) for worker in workers)

    num_reads = total("num_transfers")
    if num_reads < KNOWN_TRANSFERS:
        return typical
    mean_s, mean_bytes = total("transfer_s") / num_reads, total("num_bytes") / num_reads
    variance = total("transfer_bytes_squared") / num_reads - mean_bytes**2
    byte_s = typical.seconds(1)
    if variance > (LEAST_SPREAD * mean_bytes) ** 2:
        byte_s = max((total("transfer_byte_s") / num_reads - mean_s * mean_bytes) / variance, byte_s)
    waiting_s = mean_s - byte_s * mean_bytes
    if waiting_s > 0.0:
        return replace(typical, latency_s=waiting_s / MESSAGES_OF_READ, bytes_per_s=1.0 / byte_s)
    return replace(typical, latency_s=0.0, bytes_per_s=mean_bytes / mean_s)
