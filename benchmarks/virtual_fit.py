"""Measures how long steps take on this machine, as prices for virtual workers: fitted to real steps of one engine.

    python -m benchmarks.virtual_fit --threads 1 --beside 1 --save core.json

An engine in this process makes steps of every kind: prompts of all lengths, alone and beside running answers, which are
few or many, short or long. Half of the steps are fitted, by sums of prices (``StepTimeModel``), and the other half is
predicted: ``error/<kind>`` is the mean of their errors as a share of the time they took. With ``--beside`` so many
other processes do the same at the same time, each on cores of its own, as workers that share a machine do. ``--save``
writes the machine that ``benchmarks.virtual_cluster`` reads.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.arguments import at_least, count, positive
from benchmarks.random_llama import VOCAB_SIZE, write_random_llama
from benchmarks.report import Row, add_json_option, publish
from engine.build import build_engine
from engine.contract.config import CacheConfig, EngineConfig, ModelConfigSource, SchedulerConfig
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.step import PendingStep, SchedulerOutput
from engine.contract.step_time import StepTimeModel
from engine.contract.token_ids import TokenIds
from engine.frontend.engine_core import EngineCore
from simulation.fit import StepSample, fit_step_time, log_spread
from simulation.machine import CPU_CORE
from simulation.step_runner import work_of

MAX_MODEL_LEN = 2048
MAX_RUNNING = 24
WARM_STEPS = 20
KINDS = ("decode", "prompt", "mixed")


class WorkWatch:
    """Implements ``StepRunner`` with another one, and remembers what the last step computed."""

    def __init__(self, core: EngineCore) -> None:
        self._inner = core.runner
        self.last: SchedulerOutput | None = None

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Let the other runner compute."""
        self.last = output
        return self._inner.launch(output)


def random_request(number: int, source: random.Random) -> GenerateRequest:
    """Lengths over three orders of magnitude."""
    num_prompt = round(2 ** source.uniform(3.0, 10.5))
    return GenerateRequest(
        request_id=str(number),
        prompt_token_ids=TokenIds.of([source.randrange(1, VOCAB_SIZE) for _ in range(num_prompt)]),
        sampling=SamplingParams(max_tokens=round(2 ** source.uniform(2.0, 7.0)), ignore_eos=True),
    )


def sample_steps(model: Path, *, num_threads: int, seconds: float, seed: int) -> list[StepSample]:
    """Runs steps of an engine, and records what each computed and how long it took."""
    core = build_engine(
        EngineConfig(
            model=ModelConfigSource(path=model, device="cpu", num_threads=num_threads),
            cache=CacheConfig(num_blocks=4096, prefault=True),
            scheduler=SchedulerConfig(max_model_len=MAX_MODEL_LEN),
        )
    ).core
    watch, source = WorkWatch(core), random.Random(seed)
    core.runner = watch
    samples: list[StepSample] = []
    num_requests, goal, end_s = 0, 1, time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        if source.random() < 0.02:
            goal = round(2 ** source.uniform(0.0, 4.5))
        if core.scheduler.stats().num_running < min(goal, MAX_RUNNING) and (
            not core.has_unfinished() or source.random() < 0.3
        ):
            core.add_request(random_request(num_requests, source))
            num_requests += 1
        if not core.has_work():
            continue
        watch.last = None
        began_s = time.perf_counter()
        core.step()
        if watch.last is not None and watch.last.has_work:
            samples.append(StepSample(work=work_of(watch.last), seconds=time.perf_counter() - began_s))
    core.close()
    return samples[WARM_STEPS:]


def kind_of(sample: StepSample) -> str:
    """The kind of work that a step did."""
    if not sample.work.num_prompt_tokens:
        return "decode"
    return "mixed" if sample.work.num_rows else "prompt"


def rows_of(samples: Sequence[StepSample], model: StepTimeModel, place: str) -> list[Row]:
    """The prices, and the errors of predictions for steps other than the fitted ones."""
    prices = {
        "base": (model.base_s * 1e3, "ms"),
        "row": (model.row_s * 1e3, "ms"),
        "context_token": (model.context_token_s * 1e6, "us"),
        "prompt_token": (model.prompt_token_s * 1e3, "ms"),
        "prompt_read": (model.prompt_read_s * 1e9, "ns"),
    }
    rows = [Row(name=f"price/{name}/{place}", value=value, unit=unit) for name, (value, unit) in prices.items()]
    for kind in KINDS:
        of_kind = [sample for sample in samples if kind_of(sample) == kind]
        if not of_kind:
            continue
        errors = [100 * abs(model.seconds(sample.work) / sample.seconds - 1) for sample in of_kind]
        detail = {
            "steps": float(len(of_kind)),
            "median_ms": 1e3 * statistics.median(sample.seconds for sample in of_kind),
            "bias": 100 * (sum(model.seconds(sample.work) for sample in of_kind) / sum(s.seconds for s in of_kind) - 1),
        }
        rows.append(Row(name=f"error/{kind}/{place}", value=statistics.fmean(errors), unit="percent", detail=detail))
    return rows


def _beside(model: Path, num_threads: int, seconds: float, number: int) -> None:
    """The entry point of the other processes."""
    _take_cores(number, num_threads)
    sample_steps(model, num_threads=num_threads, seconds=seconds, seed=1000 + number)


def _take_cores(number: int, num_threads: int) -> None:
    cores = sorted(os.sched_getaffinity(0))[number * num_threads : (number + 1) * num_threads]
    if len(cores) < num_threads:
        raise SystemExit(
            f"process {number + 1} of --threads {num_threads} does not find {num_threads} cores of its own: use fewer "
            "threads or processes"
        )
    os.sched_setaffinity(0, cores)


def main() -> None:
    """Run steps, fit, predict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="directory of a model with a vocabulary of 32,000; default: a random model"
    )
    parser.add_argument("--threads", type=count, default=1, help="threads of the engine")
    parser.add_argument(
        "--beside", type=at_least(0), default=0, help="number of other processes that do the same at the same time"
    )
    parser.add_argument("--seconds", type=positive, default=40.0, help="seconds to run steps for")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the machine to FILE")
    add_json_option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model_dir = args.model
        if model_dir is None:
            model_dir = Path(directory)
            write_random_llama(model_dir, torch.bfloat16)
        context = multiprocessing.get_context("spawn")
        others = [
            context.Process(target=_beside, args=(model_dir, args.threads, 3 * args.seconds, number))
            for number in range(1, args.beside + 1)
        ]
        for process in others:
            process.start()
        try:
            if others:
                _take_cores(0, args.threads)
            samples = sample_steps(model_dir, num_threads=args.threads, seconds=args.seconds, seed=0)
        finally:
            for process in others:
                process.terminate()
                process.join()
    fitted = fit_step_time(samples[::2])
    model = replace(fitted, error=statistics.fmean(abs(fitted.seconds(s.work) / s.seconds - 1) for s in samples[1::2]))
    place = f"threads={args.threads}/beside={args.beside}"
    rows = rows_of(samples[1::2], model, place)
    if args.save is not None:
        name = f"cpu_{args.threads}_threads"
        noise = log_spread(samples[1::2], model)
        replace(CPU_CORE, name=name, step_time=model, step_noise=noise).save(args.save)
    publish(rows, packages=("torch",), json_file=args.json, title="Prices of steps")


if __name__ == "__main__":
    main()
