"""The cost of a decode step besides the model's kernels, in parts, at each batch size.

    python -m benchmarks.step_overhead --json benchmarks/results/step_overhead.json

One engine decodes ``batch`` streams of the 125 M random Llama. ``forward`` and ``logits`` are the model, all else is
overhead: first steps in which only the model is timed, then as many in which every part is, which costs some more:
``schedule``, ``prepare`` (the tokens of the step before, rows, inputs, attention plan), ``sample``, ``update`` (results
into requests and blocks) and ``rest``, what is left of the step. Where the head finds the most likely tokens while it
multiplies, that is part of ``logits``, and ``sample`` is nothing. ``publish`` comes after a step, and is no part of it:
an engine that serves makes the messages for its clients in another thread, while the next step computes.
Rows: ``<dtype>/step/<batch>`` and ``<dtype>/overhead/<batch>`` in us, medians over steps, with the parts beside the
latter, and ``<dtype>/overhead_share/<batch>`` in percent of the step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import count
from benchmarks.engine import DECODE_PROMPT_TOKENS, BatonSide, check_batches, random_prompts
from benchmarks.random_llama import write_random_llama
from benchmarks.report import Row, add_json_option, publish
from engine.executor.single_process import SingleProcessExecutor
from engine.frontend.engine_core import EngineCore

MODEL_PARTS = ("forward", "logits")
NUM_SPARE_STEPS = 8
"""Requests last this many steps longer than are timed, so that none ends in a timed step."""


def _runner_of(core: EngineCore) -> Any:
    assert isinstance(core.runner, SingleProcessExecutor)
    return core.runner.runner


class StepClock:
    """Times the parts of an engine's steps, by wrapping the methods that the engine calls."""

    def __init__(self, core: EngineCore) -> None:
        self.steps: list[dict[str, float]] = []
        self._core = core
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._is_in_part = False
        runner: Any = _runner_of(core)
        self._time((runner._recorded, "run", "forward"), (runner._model, "forward", "forward"))
        self._time((runner._model, "logits", "logits"), (runner._model, "best_tokens", "logits"))

    def time_all_parts(self) -> None:
        """From here on, time all parts, not only the model's."""
        core = self._core
        runner: Any = _runner_of(core)
        self._time(
            (core.scheduler, "schedule", "schedule"),
            (core.scheduler, "update", "update"),
            (runner._batch, "apply", "prepare"),
            (runner._batch, "prepare", "prepare"),
            (runner._attention, "plan", "prepare"),
            (runner._sampler, "sample", "sample"),
            (runner._search, "token_ids", "sample"),
        )

    def _time(self, *places: tuple[object, str, str]) -> None:
        for owner, method, part in places:
            setattr(owner, method, self._timed(part, getattr(owner, method)))

    def _timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            if self._is_in_part:  # and is timed with it
                return work(*arguments, **options)
            self._is_in_part = True
            started = time.perf_counter()
            try:
                return work(*arguments, **options)
            finally:
                self._spent[part] += time.perf_counter() - started
                self._is_in_part = False

        return timed

    def step(self) -> None:
        """Make one step of the engine, and store its parts."""
        self._spent.clear()
        started = time.perf_counter()
        result = self._core.step()
        total = time.perf_counter() - started
        result.deltas_by_client()
        publish = time.perf_counter() - started - total
        rest = total - sum(self._spent.values())
        self.steps.append({**self._spent, "rest": rest, "publish": publish, "total": total})


def measure(side: BatonSide, dtype_name: str, batch: int, num_steps: int) -> list[Row]:
    """The rows of one batch size, from steps that decode the whole batch."""
    generator = torch.Generator().manual_seed(batch)
    core = side.start(random_prompts(generator, batch, DECODE_PROMPT_TOKENS), max_tokens=_num_tokens(num_steps))
    clock = StepClock(core)
    for _ in range(num_steps):
        clock.step()
    clock.time_all_parts()
    for _ in range(num_steps):
        clock.step()
    while core.has_unfinished():
        core.step()
    whole, parted = clock.steps[:num_steps], clock.steps[num_steps:]
    total = 1e6 * statistics.median(step["total"] for step in whole)
    overhead = 1e6 * statistics.median(step["total"] - sum(step[part] for part in MODEL_PARTS) for step in whole)
    parts = sorted({part for step in parted for part in step} - {"total", *MODEL_PARTS})
    detail: dict[str, float | str] = {
        part: 1e6 * statistics.median(step.get(part, 0.0) for step in parted) for part in parts
    }
    return [
        Row(name=f"{dtype_name}/step/{batch}", value=total, unit="us"),
        Row(name=f"{dtype_name}/overhead/{batch}", value=overhead, unit="us", detail=detail),
        Row(name=f"{dtype_name}/overhead_share/{batch}", value=100 * overhead / total, unit="percent"),
    ]


def _num_tokens(num_steps: int) -> int:
    return 2 * num_steps + NUM_SPARE_STEPS


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    parser.add_argument("--batches", nargs="+", type=count, default=[1, 8, 32, 64])
    parser.add_argument("--steps", type=count, default=64)
    parser.add_argument("--threads", type=count, default=torch.get_num_threads())
    add_json_option(parser)
    args = parser.parse_args()
    check_batches(parser, args.batches, num_tokens=_num_tokens(args.steps))
    torch.set_num_threads(args.threads)
    rows: list[Row] = []
    for dtype_name in args.dtypes:
        with tempfile.TemporaryDirectory() as directory:
            write_random_llama(Path(directory), getattr(torch, dtype_name))
            for batch in args.batches:
                side = BatonSide(Path(directory), dtype_name, args.threads)
                rows.extend(measure(side, dtype_name, batch, args.steps))
    publish(rows, packages=("torch", "numpy", "numba"), json_file=args.json, title="step overhead: random Llama, 125 M")


if __name__ == "__main__":
    main()
