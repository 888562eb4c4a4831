"""The cluster over HTTP on one GPU: a random Llama of 8 B parameters, served by ``baton serve``, in a closed loop.

    python -m benchmarks.gpu_http --json benchmarks/results/gpu_http.json

Two sides, one after the other: ``default``, what ``baton serve`` makes of the machine (1 prefill and 1 decode worker
that share the GPU, elastic), and ``apart``, the same with ``roles: fixed``, so that every prompt is handed over. The
ceiling beside them, in the same run and on the same GPU, is one engine in a process of its own that decodes as many
rows at once (``engine/tokens_per_s/<concurrency>``, as ``decode/<batch>`` of benchmarks.gpu).

Rows: ``<side>/tokens_per_s/<concurrency>``, ``<side>/ttft_p50_ms/...``, ``<side>/itl_p50_ms/...``,
``<side>/transferred`` of all its requests, and ``ratio/<side>/<concurrency>``: its rate over the engine's, which
computes no prompts meanwhile. ``<side>/start`` is the time until the cluster was ready. ``<side>/equal``: share of
greedy answers, asked one at a time, that are those of the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import torch
import yaml

from benchmarks.arguments import at_least, count, positive
from benchmarks.closed_load import ClosedLoad, run_closed, send_closed
from benchmarks.gpu_parts.engine import EngineBench, Settings
from benchmarks.gpu_parts.shape import SHAPES, llama_directory
from benchmarks.report import Row, add_json_option, publish
from benchmarks.served import served_cluster
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds

SIDES: dict[str, dict[str, object]] = {"default": {}, "apart": {"roles": "fixed"}}
METRICS = {"tokens_per_s": "tokens/s", "ttft_p50_ms": "ms", "itl_p50_ms": "ms"}
NUM_COMPARED, COMPARED_TOKENS = 8, 32
WARM_WINDOW_S = 2.0


def prompts(number: int, args: argparse.Namespace) -> list[list[int]]:
    """Random token ids, the same in every process."""
    rng = random.Random(5)
    vocab_size = SHAPES[args.shape].vocab_size
    return [[rng.randrange(1, vocab_size) for _ in range(args.prompt_tokens)] for _ in range(number)]


def engine_main(settings: Settings, args: argparse.Namespace, results: Connection) -> None:
    """The rates of one engine at each batch size, and its answers; entry point of a process."""
    bench = EngineBench(settings)
    steps = {}
    for batch in args.concurrency:
        seconds = [
            bench.decode_step_s(batch, num_prompt_tokens=args.prompt_tokens, num_steps=args.output_tokens)
            for _ in range(2)
        ]
        steps[batch] = min(seconds)
    answers = [
        bench.generate(
            GenerateRequest(
                request_id=str(number),
                prompt_token_ids=TokenIds.of(prompt),
                sampling=SamplingParams(max_tokens=COMPARED_TOKENS, ignore_eos=True),
            )
        )
        for number, prompt in enumerate(prompts(NUM_COMPARED, args))
    ]
    bench.close()
    results.send((steps, answers))


def one_engine(settings: Settings, args: argparse.Namespace) -> tuple[dict[int, float], list[list[int]]]:
    """Seconds per step by batch size, and greedy answers. The GPU is free again afterwards."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=engine_main, args=(settings, args, theirs))
    process.start()
    theirs.close()
    try:
        result: tuple[dict[int, float], list[list[int]]] = ours.recv()
    finally:
        process.join()
    return result


@contextlib.contextmanager
def served(side: str, model: Path, args: argparse.Namespace) -> Iterator[str]:
    """Run the cluster; yields its URL once it is ready."""
    config = {
        "model": str(model),
        "dtype": "bfloat16",
        "device": args.device,
        "max_model_len": args.max_model_len,
        "cache": {"block_size": args.block_size},
        "scheduler": {"max_num_seqs": max(args.concurrency)},
        **SIDES[side],
    }
    if args.device == "cpu":
        config["cache"] = {"kv_cache_bytes": 1 << 26}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file)
        file.flush()
        with served_cluster(["--config", file.name]) as url:
            yield url


def share_equal(url: str, expected: Sequence[Sequence[int]], args: argparse.Namespace) -> float:
    """Share of greedy answers, requested one at a time, that equal the expected ones."""
    num_equal = 0
    for prompt, answer in zip(prompts(len(expected), args), expected, strict=True):
        body = {
            "prompt": prompt,
            "max_tokens": COMPARED_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
        response.raise_for_status()
        num_equal += response.json()["choices"][0]["token_ids"] == list(answer)
    return num_equal / len(expected)


def side_rows(side: str, url: str, args: argparse.Namespace, expected: Sequence[Sequence[int]]) -> Iterator[Row]:
    """The rows of one side."""
    yield Row(name=f"{side}/equal", value=share_equal(url, expected, args), unit="of requests")

    def load(concurrency: int, window_s: float, seed: str) -> ClosedLoad:
        return ClosedLoad(
            concurrency=concurrency,
            window_s=window_s,
            num_prompt_tokens=args.prompt_tokens,
            num_output_tokens=args.output_tokens,
            vocab_size=SHAPES[args.shape].vocab_size,
            seed=seed,
        )

    asyncio.run(send_closed(url, load(max(args.concurrency), WARM_WINDOW_S, "warm")))
    for concurrency in args.concurrency:
        seen = asyncio.run(run_closed(url, load(concurrency, args.seconds, "measured")))
        for metric, unit in METRICS.items():
            yield Row(name=f"{side}/{metric}/{concurrency}", value=float(getattr(seen, metric)), unit=unit)
    status = httpx.get(f"{url}/status", timeout=30, trust_env=False).json()
    yield Row(name=f"{side}/transferred", value=float(status["totals"]["transferred_bytes"]), unit="bytes")


def measure(model: Path, args: argparse.Namespace) -> list[Row]:
    """Measure the engine, then each side."""
    settings = Settings(
        directory=model, shape=SHAPES[args.shape], device=args.device, block_size=args.block_size, share=0.8
    )
    steps, expected = one_engine(settings, args)
    engine = {batch: batch / seconds for batch, seconds in steps.items()}
    rows = [
        Row(name=f"engine/tokens_per_s/{batch}", value=rate, unit="tokens/s", detail={"step_ms": 1e3 * steps[batch]})
        for batch, rate in engine.items()
    ]
    for side in args.sides:
        started = time.perf_counter()
        with served(side, model, args) as url:
            rows.append(Row(name=f"{side}/start", value=time.perf_counter() - started, unit="s"))
            for row in side_rows(side, url, args, expected):
                rows.append(row)
                print(f"  {row.name}: {row.value:.4g} {row.unit}", flush=True)
        rates = {row.name: row.value for row in rows}
        rows += [
            Row(name=f"ratio/{side}/{batch}", value=rates[f"{side}/tokens_per_s/{batch}"] / rate, unit="x")
            for batch, rate in engine.items()
        ]
    return rows


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only to try out this script")
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=list(SIDES))
    parser.add_argument("--block-size", type=count, default=256)
    parser.add_argument(
        "--concurrency", type=count, nargs="+", default=[1, 8, 32, 64], help="numbers of concurrent requests"
    )
    parser.add_argument("--seconds", type=positive, default=10.0, help="seconds for which each concurrency is measured")
    parser.add_argument("--prompt-tokens", type=count, default=512)
    parser.add_argument("--output-tokens", type=at_least(2), default=128)
    parser.add_argument("--max-model-len", type=count, default=8192)
    parser.add_argument("--model", type=Path, help="directory to write the model to (16 GB) and reuse in later runs")
    add_json_option(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print."""
    args = parse(arguments)
    with llama_directory(SHAPES[args.shape], torch.device(args.device), kept=args.model) as model:
        rows = measure(model, args)
    publish(
        rows,
        packages=("torch", "ray", "nixl"),
        json_file=args.json,
        title=f"one GPU over HTTP: random Llama, {args.shape}, {args.prompt_tokens} tokens in, "
        f"{args.output_tokens} out, closed loop",
    )
    print(f"median ratio to one engine: {statistics.median(row.value for row in rows if row.unit == 'x'):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
