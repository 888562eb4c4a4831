"""The cluster over HTTP: TTFT, inter-token latency and throughput under an open-loop load.

    python -m benchmarks.serving --rates 1 2 4 --json benchmarks/results/serving.json

Starts its own cluster (1 prefill, 1 decode worker), or measures ``--url``. The ceiling beside it, in the same run, is
one engine without HTTP, Ray or hand-over that gets all the requests at once. Rows: ``<metric>/rate=<requests/s>``, of
the requests that succeeded; the command ends with 1 where any failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from benchmarks.arguments import at_least, count, positive
from benchmarks.load import LoadResult, LoadSpec, run_load
from benchmarks.report import Row, add_json_option, publish
from benchmarks.served import served_cluster
from engine.contract.token_ids import TokenIds

METRICS = {
    "ttft_p50_ms": "ms",
    "ttft_p99_ms": "ms",
    "itl_p50_ms": "ms",
    "itl_p99_ms": "ms",
    "tokens_per_s": "tokens/s",
    "num_failed": "requests",
}


def result_rows(rate: float, result: LoadResult) -> list[Row]:
    """The rows of one rate."""
    return [
        Row(name=f"{name}/rate={rate:g}", value=float(getattr(result, name)), unit=unit)
        for name, unit in METRICS.items()
    ]


def one_engine_tokens_per_s(model: Path, spec: LoadSpec) -> float:
    """Output tokens per second of one engine with all requests at once, in a process of its own."""
    code = "from benchmarks.serving import _engine_main; _engine_main()"
    arguments = [str(model), str(spec.num_requests), str(spec.num_prompt_tokens), str(spec.num_output_tokens)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def _engine_main() -> None:
    """Entry of the process of ``one_engine_tokens_per_s``."""
    import time

    from engine.build import build_engine
    from engine.contract.config import EngineConfig, ModelConfigSource
    from engine.contract.messages import GenerateRequest, SamplingParams
    from engine.frontend.offline import generate

    model, num_requests, num_prompt, num_output = Path(sys.argv[1]), *map(int, sys.argv[2:])
    built = build_engine(EngineConfig(model=ModelConfigSource(path=model, device="cpu")))
    rng = random.Random(0)

    def requests(prefix: str, count: int) -> Iterator[GenerateRequest]:
        for number in range(count):
            prompt = tuple(rng.randrange(1, built.facts.vocab_size) for _ in range(num_prompt))
            sampling = SamplingParams(max_tokens=num_output, ignore_eos=True)
            yield GenerateRequest(
                request_id=f"{prefix}{number}", prompt_token_ids=TokenIds.of(prompt), sampling=sampling
            )

    generate(built.core, requests("warm", 2))
    started = time.perf_counter()
    generate(built.core, requests("timed", num_requests))
    print(num_requests * num_output / (time.perf_counter() - started))


def measure(url: str, args: argparse.Namespace, vocab_size: int) -> list[Row]:
    """Measure every rate in turn, after a warm-up that does not count."""
    rows: list[Row] = []
    for place, rate in enumerate([args.rates[0], *args.rates]):
        spec = LoadSpec(
            rate=rate,
            num_requests=args.requests if place else 4,
            num_prompt_tokens=args.prompt_tokens,
            num_output_tokens=args.output_tokens,
            vocab_size=vocab_size,
            seed=place,
        )
        result = asyncio.run(run_load(url, spec))
        if place:
            rows.extend(result_rows(rate, result))
    return rows


def transferred_bytes(url: str) -> float:
    """Bytes of KV that the cluster has moved since its start."""
    return float(httpx.get(f"{url}/status", timeout=30, trust_env=False).json()["totals"]["transferred_bytes"])


def failures(rows: Sequence[Row]) -> list[str]:
    """The rates at which requests failed, and how many, as text."""
    return [f"{row.value:g} requests failed: {row.name}" for row in rows if row.unit == "requests" and row.value]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="URL of a running cluster; default: start one")
    parser.add_argument("--model", type=Path, help="the model's directory; default: the built-in model")
    parser.add_argument("--rates", type=positive, nargs="+", default=[1.0, 2.0, 4.0], help="requests per second")
    parser.add_argument("--requests", type=count, default=40, help="number of requests at each rate")
    parser.add_argument("--prompt-tokens", type=count, default=128)
    parser.add_argument("--output-tokens", type=at_least(2), default=64)
    add_json_option(parser)
    args = parser.parse_args()
    if args.model is None:
        from engine.model.builtin import builtin_model_dir

        args.model = builtin_model_dir()
    from engine.model.registry import load_model_config

    vocab_size = load_model_config(args.model).vocab_size
    with contextlib.ExitStack() as stack:
        url = args.url or stack.enter_context(served_cluster(["--model", str(args.model)]))
        before = transferred_bytes(url)
        rows = measure(url, args, vocab_size)
        transferred = transferred_bytes(url) - before
    spec = LoadSpec(
        rate=1.0,
        num_requests=args.requests,
        num_prompt_tokens=args.prompt_tokens,
        num_output_tokens=args.output_tokens,
        vocab_size=vocab_size,
        seed=0,
    )
    rows.append(Row(name="ceiling/one_engine", value=one_engine_tokens_per_s(args.model, spec), unit="tokens/s"))
    rows.append(Row(name="transferred", value=transferred, unit="bytes"))
    publish(
        rows,
        packages=("torch", "ray", "nixl"),
        json_file=args.json,
        title=f"serving: {args.model.name}, {args.prompt_tokens} tokens in, {args.output_tokens} out, open loop",
    )
    if failed := failures(rows):
        sys.exit("; ".join(failed))


if __name__ == "__main__":
    main()
