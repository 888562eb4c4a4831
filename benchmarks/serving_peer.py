"""The cluster over HTTP compared with ``vllm serve``: the same model, client and load, two threads each.

    python -m benchmarks.serving_peer --dtype bfloat16 --json benchmarks/results/serving_peer_bfloat16.json

Four sides: ``default``, a cluster of 1 prefill and 1 decode worker with a core each, who take each other's while it is
idle; ``fixed``, the same with ``borrow_idle_cores: false`` (only if asked for); ``unified``, one whose decode worker
computes every prompt itself and has both threads, while the prefill worker sleeps; and ``vllm``, vLLM's CPU build, one
engine with two threads. Router, API server and client share the same cores. All get the same prompts of token ids in a
closed loop (benchmarks/closed_load.py). ``--repeats`` rounds start each server once. In a round all sides take
``--turns`` turns of ``--seconds`` at each concurrency, each first in turn, and the others stand still meanwhile
(benchmarks/standing_still.py). The first run installs the peer under ``.cache``.

Rows are medians over all turns: ``<side>/tokens_per_s/<dtype>/<concurrency>``, ``<side>/ttft_p50_ms/...``,
``<side>/itl_p50_ms/...``, ``<side>/cpu_ms_per_token/...`` of all its processes with each process's in the detail, and
for Baton ``<side>/cpu_ms_outside_engines/...``: the same without the threads that compute, and
``<side>/cpu_ms_above_rest/...``: that, less what the cluster takes in this time while nobody asks, which
``<side>/idle_cpu/<dtype>`` tells of every side. ``ratio/http/<side>/...`` is a side's rate over vLLM's of the same
turn, ``ratio/http_ttft/...`` and ``ratio/http_itl/...`` vLLM's time over the side's: above 1 is faster.
``default/transferred/<dtype>`` shows the hand-overs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import torch
import yaml

from benchmarks.closed_load import ClosedFigures, ClosedLoad, run_closed, send_closed
from benchmarks.cpu_watch import ENGINE_THREADS, MARK, CpuWatch, spent
from benchmarks.peers.process import PEERS, peer_python
from benchmarks.peers.vllm_server import NAME, served_vllm
from benchmarks.process_group import end_on_sigterm
from benchmarks.random_llama import VOCAB_SIZE, name_all_tokens, write_random_llama
from benchmarks.report import Row, add_json_option, publish
from benchmarks.served import served_cluster
from benchmarks.standing_still import standing_still

DEFAULT, FIXED, UNIFIED, VLLM = "default", "fixed", "unified", "vllm"
SIDES = (DEFAULT, FIXED, UNIFIED, VLLM)
OUTSIDE, ABOVE_REST = "cpu_ms_outside_engines", "cpu_ms_above_rest"
MAX_MODEL_LEN = 1024
SCHEDULER = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
METRICS = {"tokens_per_s": "tokens/s", "ttft_p50_ms": "ms", "itl_p50_ms": "ms"}
WARM_WINDOW_S = 2.0
REST_S, IDLE_S = 3.0, 10.0
WAKE_S = 1.0
"""Pause after a server was stopped or resumed, in which it catches up with its timers."""

MENTIONED_MS = 0.005

Server = Callable[[Mapping[str, str]], AbstractContextManager[str]]
"""Starts a server with these variables added to its environment; yields its URL."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """The figures of each turn, by side and concurrency; by side the CPU time of a second of rest in each round, by
    process; and the bytes that the default cluster handed over."""

    closed: dict[tuple[str, int], list[ClosedFigures]] = field(default_factory=lambda: defaultdict(list))
    idle_s: dict[str, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))
    transferred_bytes: list[float] = field(default_factory=list)


def baton_config(side: str, model: Path, dtype: str) -> dict[str, object]:
    """The configuration of a side with two threads on two cores: one for each of two workers, or both for one that does
    everything.
    """
    layouts: dict[str, dict[str, object]] = {
        DEFAULT: {},
        FIXED: {"borrow_idle_cores": False},
        UNIFIED: {
            "roles": "fixed",
            "prefill": {"num_threads": 1},
            "decode": {"num_threads": 2},
            "router": {"local_prefill_tokens": 1 << 20},
        },
    }
    return {
        "model": str(model),
        "dtype": dtype,
        "device": "cpu",
        "max_model_len": MAX_MODEL_LEN,
        "scheduler": SCHEDULER,
        "cache": {"kv_cache_bytes": 1 << 30},
        **layouts[side],
    }


@contextlib.contextmanager
def served_baton(side: str, model: Path, dtype: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Run the cluster; yields its URL once it is ready."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(baton_config(side, model, dtype), file)
        file.flush()
        with served_cluster(["--config", file.name], environment=environment) as url:
            yield url


@dataclass(frozen=True, slots=True)
class Running:
    """A running server, and how its processes are found."""

    url: str
    watch: CpuWatch


def load_of(concurrency: int, turn: str, args: argparse.Namespace) -> ClosedLoad:
    """The load of one turn: the same on all sides, new prompts in every turn."""
    return ClosedLoad(
        concurrency=concurrency,
        window_s=args.seconds,
        num_prompt_tokens=args.prompt_tokens,
        num_output_tokens=args.output_tokens,
        vocab_size=VOCAB_SIZE,
        seed=turn,
    )


def prepare_side(name: str, server: Running, rounds: Rounds, args: argparse.Namespace) -> None:
    """Warm a server up at the highest concurrency, which does not count, and measure its CPU use at rest."""
    round_number = len(rounds.idle_s[name])
    warm = ClosedLoad(
        concurrency=max(args.concurrency),
        window_s=WARM_WINDOW_S,
        num_prompt_tokens=args.prompt_tokens,
        num_output_tokens=min(8, args.output_tokens),
        vocab_size=VOCAB_SIZE,
        seed=f"warm {round_number}",
    )
    asyncio.run(send_closed(server.url, warm))
    time.sleep(REST_S)
    before = server.watch.take()
    time.sleep(IDLE_S)
    idle_s = {process: cpu_s / IDLE_S for process, cpu_s in spent(before, server.watch.take()).items()}
    rounds.idle_s[name].append(idle_s)
    print(f"round {round_number + 1}, {name} at rest: {sum(idle_s.values()):.1%} of a core", flush=True)


def take_turn(name: str, server: Running, load: ClosedLoad, rounds: Rounds) -> None:
    """Measure one side's turn at a concurrency."""
    time.sleep(WAKE_S)
    seen = asyncio.run(run_closed(server.url, load, server.watch))
    rounds.closed[name, load.concurrency].append(seen)
    cpu = ", ".join(f"{process} {ms:.2f}" for process, ms in seen.cpu_ms_per_token.items() if ms >= MENTIONED_MS)
    print(
        f"turn {load.seed}, {name} at concurrency {load.concurrency}: {seen.tokens_per_s:.0f} tokens/s, "
        f"ttft {seen.ttft_p50_ms:.0f} ms, itl {seen.itl_p50_ms:.1f} ms, {seen.num_requests} requests; "
        f"CPU in ms a token: {cpu}",
        flush=True,
    )


def measure(servers: Mapping[str, Server], args: argparse.Namespace) -> Rounds:
    """Run all rounds; each side is first in turn."""
    rounds = Rounds()
    for round_number in range(args.repeats):
        with contextlib.ExitStack() as stack:
            running: dict[str, Running] = {}

            def alone(name: str, running: Mapping[str, Running] = running) -> AbstractContextManager[None]:
                return standing_still([server.watch for other, server in running.items() if other != name])

            for name, start in servers.items():
                mark = uuid.uuid4().hex
                with alone(name):
                    running[name] = Running(stack.enter_context(start({MARK: mark})), CpuWatch(mark))
                    prepare_side(name, running[name], rounds, args)
            for turn in range(args.turns):
                order = list(running) if turn % 2 == 0 else list(running)[::-1]
                for concurrency in args.concurrency:
                    for name in order:
                        with alone(name):
                            load = load_of(concurrency, f"{round_number + 1}.{turn + 1}", args)
                            take_turn(name, running[name], load, rounds)
            if DEFAULT in running:
                status = httpx.get(f"{running[DEFAULT].url}/status", timeout=30, trust_env=False).json()
                rounds.transferred_bytes.append(float(status["totals"]["transferred_bytes"]))
    return rounds


def side_rows(dtype: str, rounds: Rounds) -> list[Row]:
    """The rows of each side at rest and at each concurrency."""
    rows = []
    for name, at_rest in rounds.idle_s.items():
        total, by_process = _medians(at_rest)
        detail: dict[str, float | str] = {process: cpu_s * 100 for process, cpu_s in by_process.items()}
        rows.append(Row(name=f"{name}/idle_cpu/{dtype}", value=total * 100, unit="% of a core", detail=detail))
    for (name, concurrency), seen in rounds.closed.items():
        for metric, unit in METRICS.items():
            values = [float(getattr(figures, metric)) for figures in seen]
            detail = {"lowest": min(values), "highest": max(values)}
            if metric == "tokens_per_s":
                detail["requests"] = float(sum(figures.num_requests for figures in seen))
            if metric == "itl_p50_ms":
                detail["tpot_p50_ms"] = statistics.median(figures.tpot_p50_ms for figures in seen)
                detail["tokens_per_read"] = statistics.median(figures.tokens_per_read for figures in seen)
            rows.append(
                Row(
                    name=f"{name}/{metric}/{dtype}/{concurrency}",
                    value=statistics.median(values),
                    unit=unit,
                    detail=detail,
                )
            )
        at_rest_ms, _ = _medians([{who: s * 1000 for who, s in taken.items()} for taken in rounds.idle_s[name]])
        rows += cpu_rows(name, f"{dtype}/{concurrency}", seen, at_rest_ms=at_rest_ms)
    return rows


def cpu_rows(side: str, case: str, seen: Sequence[ClosedFigures], *, at_rest_ms: float) -> list[Row]:
    """Milliseconds of CPU per token: of all processes, without the compute threads of engines, and without what the
    side takes at rest, which is ``at_rest_ms`` in a second.
    """
    taken = [figures.cpu_ms_per_token for figures in seen]
    total, by_process = _medians(taken)
    rows = [Row(name=f"{side}/cpu_ms_per_token/{case}", value=total, unit="ms", detail=dict(by_process))]
    if side != VLLM:
        outside = [sum(of_turn.values()) - of_turn.get(ENGINE_THREADS, 0.0) for of_turn in taken]
        above = [ms - at_rest_ms / figures.tokens_per_s for ms, figures in zip(outside, seen, strict=True)]
        rows.append(Row(name=f"{side}/{OUTSIDE}/{case}", value=statistics.median(outside), unit="ms"))
        rows.append(Row(name=f"{side}/{ABOVE_REST}/{case}", value=statistics.median(above), unit="ms"))
    return rows


def _medians(seen: Sequence[Mapping[str, float]]) -> tuple[float, dict[str, float]]:
    """Medians over rounds: of all processes together, and of each."""
    processes = sorted({name for of_round in seen for name in of_round})
    by_process = {name: statistics.median(of_round.get(name, 0.0) for of_round in seen) for name in processes}
    return statistics.median(sum(of_round.values()) for of_round in seen), by_process


def ratio_rows(dtype: str, rounds: Rounds, side: str, concurrencies: Sequence[int]) -> list[Row]:
    """A side's ratio to vLLM: the median of the ratios of all turns, with the lowest and the highest."""
    rows = []
    for concurrency in concurrencies:
        ours, theirs = rounds.closed[side, concurrency], rounds.closed[VLLM, concurrency]
        for metric, name in {"tokens_per_s": "http", "ttft_p50_ms": "http_ttft", "itl_p50_ms": "http_itl"}.items():
            over, under = (ours, theirs) if metric == "tokens_per_s" else (theirs, ours)
            upper = [float(getattr(figures, metric)) for figures in over]
            lower = [float(getattr(figures, metric)) for figures in under]
            each = [a / b for a, b in zip(upper, lower, strict=True)]
            rows.append(
                Row(
                    name=f"ratio/{name}/{side}/{dtype}/{concurrency}",
                    value=statistics.median(each),
                    unit="x",
                    detail={"lowest": min(each), "highest": max(each)},
                )
            )
    return rows


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=[DEFAULT, UNIFIED, VLLM])
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 8, 16, 32], help="numbers of concurrent requests"
    )
    parser.add_argument("--repeats", type=int, default=3, help="number of rounds; each starts all servers")
    parser.add_argument("--turns", type=int, default=3, help="turns of each side at each concurrency in a round")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds for which a turn is measured")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    add_json_option(parser)
    args = parser.parse_args()
    if min(args.repeats, args.turns, *args.concurrency) < 1 or args.output_tokens < 2:
        parser.error("--repeats, --turns and --concurrency must be at least 1, --output-tokens at least 2")
    end_on_sigterm()
    if VLLM in args.sides:
        peer_python(NAME)  # installs it before anything is timed
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_random_llama(model, getattr(torch, args.dtype))
        name_all_tokens(model)
        limits = {"max_model_len": MAX_MODEL_LEN, **SCHEDULER}
        servers: dict[str, Server] = {
            side: partial(served_baton, side, model, args.dtype)
            for side in (DEFAULT, FIXED, UNIFIED)
            if side in args.sides
        }
        if VLLM in args.sides:
            servers[VLLM] = partial(served_vllm, model, dtype=args.dtype, num_threads=2, limits=limits)
        try:
            rounds = measure(servers, args)
        except RuntimeError as error:
            sys.exit(f"{type(error).__name__}: {error}")
    rows = side_rows(args.dtype, rounds)
    for side in servers if VLLM in servers else ():
        if side != VLLM:
            rows += ratio_rows(args.dtype, rounds, side, args.concurrency)
    if DEFAULT in servers:
        rows.append(Row(name=f"{DEFAULT}/transferred/{args.dtype}", value=sum(rounds.transferred_bytes), unit="bytes"))
    publish(
        rows,
        packages=("torch", "ray", "nixl"),
        json_file=args.json,
        title=f"serving beside {PEERS[NAME].requirements[0]}: random Llama, 125 M parameters, "
        f"{args.prompt_tokens} tokens in, {args.output_tokens} out, closed loop",
    )


if __name__ == "__main__":
    main()
