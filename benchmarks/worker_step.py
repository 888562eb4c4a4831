"""A worker's steps in its cluster compared with the same engine alone: what deploying costs, and whether threads run.

    python -m benchmarks.worker_step --json benchmarks/results/worker_step.json

A cluster whose decode worker computes everything itself (as ``unified`` of benchmarks/serving_peer.py), with 2 threads
and with 1, gets ``batch`` requests at once; what is looked at is a window in which all of them decode. The engine alone
runs the same batch, in a process of its own, stepped by its main thread: once while the cluster stands still
(benchmarks/standing_still.py), and once ``beside`` the cluster, which is at rest. All take ``--turns`` turns of
``--seconds``.

Rows are medians over the turns: ``<side>/step_ms/<threads>/<batch>`` (of means over the windows);
``ratio/step/<threads>/<batch>``, the worker's over that of the engine alone in the same turn, below 1.05 wanted;
``ratio/beside/<threads>/<batch>``, how much longer the engine alone takes where a cluster is at rest on its cores;
``worker/cpu_per_wall/<threads>/<batch>``, CPU seconds of the engine's threads in a second of the window;
``worker/team_sleeps/<threads>/<batch>``, how often a second the threads of the team (all but the one that steps) went
to sleep.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.arguments import count, positive
from benchmarks.cpu_watch import MARK, CpuWatch, ThreadUse
from benchmarks.random_llama import VOCAB_SIZE, name_all_tokens, write_random_llama
from benchmarks.report import Row, add_json_option, publish
from benchmarks.served import served_cluster
from benchmarks.serving_peer import UNIFIED, WAKE_S, baton_config
from benchmarks.standing_still import standing_still
from benchmarks.token_stream import StreamClient

NUM_PROMPT_TOKENS = 32
MAX_OUTPUT_TOKENS = 960
"""This many tokens last longer than the window, at any batch size."""

SETTLE_S = 1.0
"""Seconds from the last request until the window: by then all prompts are computed."""

WORKER, ALONE, BESIDE = "worker", "alone", "beside"


@dataclass(frozen=True, slots=True)
class Figures:
    """One window: mean seconds per step, CPU seconds per second, and sleeps of the team per second."""

    step_s: float
    cpu_per_wall: float = 0.0
    team_sleeps: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """Mean seconds per step of the engine alone, then beside the cluster, and the worker's figures right after."""

    alone_s: float
    beside_s: float
    worker: Figures


def steps_so_far(url: str) -> tuple[float, float]:
    """Number and total seconds of the decode worker's steps, from ``/metrics``."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text

    def value(name: str) -> float:
        lines = re.findall(rf"^baton:{name}{{([^}}]*)}} (\S+)$", text, flags=re.MULTILINE)
        return sum(float(number) for labels, number in lines if 'role="decode"' in labels)

    return value("engine_steps_total"), value("engine_step_seconds_total")


async def decode_window(url: str, watch: CpuWatch, batch: int, window_s: float) -> Figures:
    """Have ``batch`` requests decode, and measure the worker meanwhile; the requests are cancelled afterwards."""
    rng = random.Random(batch)
    clients = [StreamClient(url) for _ in range(batch)]
    prompts = [[rng.randrange(1, VOCAB_SIZE) for _ in range(NUM_PROMPT_TOKENS)] for _ in clients]
    asking = [
        asyncio.create_task(client.ask(prompt, MAX_OUTPUT_TOKENS))
        for client, prompt in zip(clients, prompts, strict=True)
    ]
    await asyncio.sleep(SETTLE_S)
    (num_before, step_s_before), before = steps_so_far(url), watch.take_engine("decode")
    began_s = time.perf_counter()
    await asyncio.sleep(window_s)
    (num_after, step_s_after), after = steps_so_far(url), watch.take_engine("decode")
    wall_s = time.perf_counter() - began_s
    for task in asking:
        if task.done():
            raise RuntimeError(f"an answer ended within the window of {window_s:g} s: use a shorter window")
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    for client in clients:
        client.close()
    if num_after == num_before:
        raise RuntimeError(f"the worker reported no step in a window of {window_s:g} s: the machine is too busy")
    return Figures(
        step_s=(step_s_after - step_s_before) / (num_after - num_before),
        cpu_per_wall=sum(use.cpu_s - before.get(thread, ThreadUse(0, 0)).cpu_s for thread, use in after.items())
        / wall_s,
        team_sleeps=_team_sleeps(before, after) / wall_s,
    )


def _team_sleeps(before: Mapping[int, ThreadUse], after: Mapping[int, ThreadUse]) -> int:
    """Number of sleeps of all threads except the oldest, which is the one that steps."""
    team = sorted(after)[1:]
    return sum(after[thread].num_sleeps - before.get(thread, ThreadUse(0, 0)).num_sleeps for thread in team)


class EngineAlone:
    """The same engine in a process of its own, which sleeps between its turns."""

    def __init__(self, model: Path, dtype: str, num_threads: int, window_s: float) -> None:
        command = [sys.executable, "-m", "benchmarks.worker_step", "--alone", str(model), "--dtype", dtype]
        command += ["--threads", str(num_threads), "--seconds", str(window_s)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step_s(self, batch: int) -> float:
        """Mean seconds of a step in a window in which ``batch`` requests decode.

        Raises:
            RuntimeError: The process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which reading shows
            self._process.stdin.write(f"{batch}\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process with the engine alone ended; its error is printed above")
        return float(line)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def serve_alone(args: argparse.Namespace) -> None:
    """The process of ``EngineAlone``: reads batch sizes from standard input, and prints seconds per step, one line
    each.
    """
    from engine.device.torch_environment import prepare_torch

    prepare_torch(args.threads[0])
    from benchmarks.engine import BatonSide

    side, rng = BatonSide(args.alone, args.dtype, args.threads[0]), random.Random(1)
    for line in sys.stdin:
        prompts = [[rng.randrange(1, VOCAB_SIZE) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(int(line))]
        core = side.start(prompts, max_tokens=MAX_OUTPUT_TOKENS)
        settled_s = time.perf_counter() + SETTLE_S
        while time.perf_counter() < settled_s:
            core.step()
        began_s, num_steps = time.perf_counter(), 0
        while time.perf_counter() < began_s + args.seconds:
            core.step()
            num_steps += 1
        print((time.perf_counter() - began_s) / num_steps, flush=True)
        side.give_up()


def take_turns(model: Path, num_threads: int, args: argparse.Namespace) -> dict[int, list[Turn]]:
    """The turns of both sides with this many threads, by batch size."""
    mark = uuid.uuid4().hex
    watch = CpuWatch(mark)
    config = {**baton_config(UNIFIED, model, args.dtype), "decode": {"num_threads": num_threads}}
    turns: dict[int, list[Turn]] = {batch: [] for batch in args.batches}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file, contextlib.ExitStack() as stack:
        json.dump(config, file)  # which is YAML as well
        file.flush()
        url = stack.enter_context(served_cluster(["--config", file.name], environment={MARK: mark}))
        engine = EngineAlone(model, args.dtype, num_threads, args.seconds)
        stack.callback(engine.close)
        asyncio.run(decode_window(url, watch, max(args.batches), args.seconds))  # which does not count
        for _ in range(args.turns):
            for batch, seen in turns.items():
                with standing_still([watch]):
                    alone_s = engine.step_s(batch)
                time.sleep(WAKE_S)
                beside_s = engine.step_s(batch)
                seen.append(Turn(alone_s, beside_s, asyncio.run(decode_window(url, watch, batch, args.seconds))))
    return turns


def rows_of(turns: Mapping[int, Sequence[Turn]], num_threads: int) -> list[Row]:
    """All rows for one number of threads."""
    rows = []
    for batch, seen in turns.items():
        name = f"{num_threads}/{batch}"
        ratios = [turn.worker.step_s / turn.alone_s for turn in seen]
        worker_ms = statistics.median(turn.worker.step_s for turn in seen) * 1e3
        alone_ms = statistics.median(turn.alone_s for turn in seen) * 1e3
        beside_ms = statistics.median(turn.beside_s for turn in seen) * 1e3
        beside_ratio = statistics.median(turn.beside_s / turn.alone_s for turn in seen)
        cpu_per_wall = statistics.median(turn.worker.cpu_per_wall for turn in seen)
        sleeps = statistics.median(turn.worker.team_sleeps for turn in seen)
        detail: dict[str, float | str] = {"lowest": min(ratios), "highest": max(ratios)}
        rows += [
            Row(name=f"{WORKER}/step_ms/{name}", value=worker_ms, unit="ms"),
            Row(name=f"{ALONE}/step_ms/{name}", value=alone_ms, unit="ms"),
            Row(name=f"{BESIDE}/step_ms/{name}", value=beside_ms, unit="ms"),
            Row(name=f"ratio/step/{name}", value=statistics.median(ratios), unit="x", detail=detail),
            Row(name=f"ratio/{BESIDE}/{name}", value=beside_ratio, unit="x"),
            Row(name=f"{WORKER}/cpu_per_wall/{name}", value=cpu_per_wall, unit="cores"),
            Row(name=f"{WORKER}/team_sleeps/{name}", value=sleeps, unit="1/s"),
        ]
    return rows


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", nargs="+", type=count, default=[2, 1])
    parser.add_argument("--batches", nargs="+", type=count, default=[1, 8, 32])
    parser.add_argument("--turns", type=count, default=5)
    parser.add_argument("--seconds", type=positive, default=2.0, help="length of a window in seconds")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    add_json_option(parser)
    args = parser.parse_args()
    if args.alone is not None:
        serve_alone(args)
        return
    import torch

    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        write_random_llama(model, getattr(torch, args.dtype))
        name_all_tokens(model)
        for num_threads in args.threads:
            rows += rows_of(take_turns(model, num_threads, args), num_threads)
    publish(rows, packages=("torch", "ray", "baton-serve"), json_file=args.json, title="A worker's steps")


if __name__ == "__main__":
    main()
