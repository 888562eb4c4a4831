"""Does separating prefill from decode pay? The same load on three clusters of two threads in all, behind one router.

    python -m benchmarks.disagg --rates 0.5 1 2 --json benchmarks/results/disagg.json
    python -m benchmarks.disagg --matrix --json benchmarks/results/regret.json

``disagg``: one prefill and one decode worker with one thread each. ``disagg_lead``: the same, and decode computes
prompts itself while ``--queue-lead`` more prompt tokens wait at prefill than there (docs/routing.md). ``single``: one
engine with two threads that does both, in chunks. ``single_small``: the same with chunks of ``--small-chunk`` tokens,
for short gaps at the cost of the prompts. ``two``: two engines like ``single`` with one thread each. The load is open
loop: streams (short prompt, long answer) at random times with a mean rate, and bursts of long prompts with short
answers. Rows of a cluster and a rate: ``<cluster>/itl_p99_ms/rate=<r>`` and so on of the streams,
``<cluster>/burst_ttft_p50_ms/...`` of the bursts, and ``<cluster>/goodput/...``: requests per second that met the
limits on time to first token and on their own p90 gap between tokens. ``ratio/itl_p99/...`` is the separated cluster's
over the single engine's, ``ratio/itl_p99_small/...`` over that with small chunks. Choose rates that the machine can
serve: a stream brings 64 + 0.4 x 1,024 prompt tokens.

``--matrix`` instead measures ``apart`` (as ``disagg``), ``one`` (as ``single``), ``one_small``, ``two`` and ``elastic``
(``roles: elastic``) under one promise (``--ttft-limit-ms``, ``--itl-limit-ms``) in cells of {low, mid, saturated} x
{prompt_heavy, balanced, decode_heavy} x {steady, bursts, step}. The rates come from a short calibration by ``two``.
Rows are ``<layout>/<figure>/<level>/<mix>/<shape>``; ``regret/goodput/<cell>`` is elastic's goodput over the best of
the others, ``regret/itl_p99/<cell>`` its p99 gap over the least of those that reach 0.95 of the best goodput.
``--layouts`` and ``--cells`` choose some of it, and ``--merge`` keeps what ``--json FILE`` already has of others.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml

from benchmarks.arguments import at_least, count, positive
from benchmarks.disagg_parts.layouts import LAYOUTS
from benchmarks.disagg_parts.matrix import run_matrix
from benchmarks.load import Arrival, LoadSpec, Timing, percentile, poisson_arrivals, send_all
from benchmarks.random_llama import VOCAB_SIZE, write_random_llama
from benchmarks.report import Row, add_json_option, publish
from benchmarks.served import served_cluster

DISAGG, DISAGG_LEAD, SINGLE, SINGLE_SMALL, TWO = "disagg", "disagg_lead", "single", "single_small", "two"
STREAM, BURST = "stream", "burst"


def settings_of(name: str, args: argparse.Namespace) -> dict[str, object]:
    """The configuration of a cluster. Except for the first, the prefill worker never gets a request, so it sleeps."""
    if name in (DISAGG, DISAGG_LEAD):
        lead = args.queue_lead if name == DISAGG_LEAD else 0
        threads = {"num_threads": 1}
        return {"roles": "fixed", "prefill": threads, "decode": threads, "router": {"max_prefill_queue_lead": lead}}
    all_local = {"roles": "fixed", "router": {"local_prefill_tokens": 1 << 20}, "prefill": {"num_threads": 1}}
    if name == TWO:
        return {**all_local, "decode_replicas": 2, "decode": {"num_threads": 1}}
    chunks = {"max_num_batched_tokens": args.small_chunk} if name == SINGLE_SMALL else {}
    return {**all_local, "decode": {"num_threads": 2, "scheduler": chunks}}


def mixed_load(rate: float, args: argparse.Namespace, *, part: int) -> list[Arrival]:
    """``rate`` streams per second, and every ``burst_period`` seconds ``burst_share`` long prompts for each of them.

    No two parts have a prompt in common, which a cluster would find in its prefix cache.
    """
    num_streams = max(4, int(rate * args.seconds))
    streams = poisson_arrivals(
        LoadSpec(
            rate=rate,
            num_requests=num_streams,
            num_prompt_tokens=args.stream_prompt_tokens,
            num_output_tokens=args.stream_output_tokens,
            vocab_size=VOCAB_SIZE,
            seed=2 * part,
        ),
        kind=STREAM,
    )
    rng = random.Random(2 * part + 1)
    per_burst = max(1, round(rate * args.burst_period * args.burst_share))
    bursts = [
        Arrival(
            at_s=start,
            kind=BURST,
            prompt=[rng.randrange(1, VOCAB_SIZE) for _ in range(args.burst_prompt_tokens)],
            num_output_tokens=args.burst_output_tokens,
        )
        for start in _multiples(args.burst_period, streams[-1].at_s)
        for _ in range(per_burst)
    ]
    return [*streams, *bursts]


def _multiples(step: float, end: float) -> list[float]:
    return [number * step for number in range(1, int(end / step) + 1)]


def is_good(timing: Timing, args: argparse.Namespace) -> bool:
    """True when a request met both limits."""
    if timing.error is not None or timing.ttft_s * 1e3 > args.ttft_limit_ms:
        return False
    return not timing.gaps_s or percentile(timing.gaps_s, 0.9) * 1e3 <= args.itl_limit_ms


def cluster_rows(name: str, rate: float, timings: Sequence[Timing], args: argparse.Namespace) -> list[Row]:
    """The rows of one cluster at one rate."""
    failed = [timing.error for timing in timings if timing.error is not None]
    if failed:
        raise SystemExit(f"{name} at rate {rate}: {len(failed)} requests failed; the first: {failed[0]}")
    streams = [timing for timing in timings if timing.kind == STREAM]
    bursts = [timing for timing in timings if timing.kind == BURST]
    gaps = [gap * 1e3 for timing in streams for gap in timing.gaps_s]
    num_good = sum(is_good(timing, args) for timing in timings)
    duration = max(timing.token_times[-1] for timing in timings) - min(timing.sent for timing in timings)
    values = {
        "itl_p50_ms": (statistics.median(gaps), "ms"),
        "itl_p99_ms": (percentile(gaps, 0.99), "ms"),
        "ttft_p50_ms": (statistics.median(timing.ttft_s * 1e3 for timing in streams), "ms"),
        "ttft_p99_ms": (percentile([timing.ttft_s * 1e3 for timing in streams], 0.99), "ms"),
        "goodput": (num_good / duration, "requests/s"),
        "share_good": (100 * num_good / len(timings), "percent"),
    }
    if bursts:
        values["burst_ttft_p50_ms"] = (statistics.median(timing.ttft_s * 1e3 for timing in bursts), "ms")
    return [Row(name=f"{name}/{key}/rate={rate:g}", value=value, unit=unit) for key, (value, unit) in values.items()]


def measure(name: str, model: Path, args: argparse.Namespace) -> list[Row]:
    """Measure one cluster at every rate, after a warm-up that does not count."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump({"model": str(model), "max_model_len": args.max_model_len, **settings_of(name, args)}, file)
        file.flush()
        rows: list[Row] = []
        with served_cluster(["--config", file.name]) as url:
            asyncio.run(send_all(url, mixed_load(args.rates[0], args, part=0)[:4]))
            for part, rate in enumerate(args.rates, start=1):
                timings = asyncio.run(send_all(url, mixed_load(rate, args, part=part)))
                rows.extend(cluster_rows(name, rate, timings, args))
                print(f"{name} at {rate:g} streams/s: done", flush=True)
        return rows


def ratio_rows(rows: Sequence[Row], rates: Sequence[float]) -> list[Row]:
    """Ratio of the separated cluster's worst gap to the single engine's, at each rate."""
    values = {row.name: row.value for row in rows}
    return [
        Row(
            name=f"ratio/{row}/rate={rate:g}",
            value=values[f"{DISAGG}/itl_p99_ms/rate={rate:g}"] / values[f"{other}/itl_p99_ms/rate={rate:g}"],
            unit="x",
        )
        for row, other in (("itl_p99", SINGLE), ("itl_p99_small", SINGLE_SMALL))
        for rate in rates
    ]


def add_matrix_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``--matrix``."""
    parser.add_argument("--matrix", action="store_true", help="measure the regret matrix")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS, help="layouts of the matrix")
    parser.add_argument(
        "--cells", nargs="+", default=["*"], metavar="PATTERN", help="cells of the matrix, such as low/*/steady"
    )
    parser.add_argument(
        "--cell-seconds", type=positive, default=8.0, help="seconds for which requests arrive in a cell"
    )
    parser.add_argument("--calibrate-seconds", type=positive, default=8.0, help="seconds of calibration for each mix")
    parser.add_argument(
        "--capacity", nargs="+", default=[], metavar="MIX=RATE", help="known capacities, instead of a calibration"
    )
    parser.add_argument("--merge", action="store_true", help="keep the rows of other layouts and cells in --json FILE")


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="directory of a model with a vocabulary of 32,000; default: a random model"
    )
    parser.add_argument("--rates", type=positive, nargs="+", default=[0.5, 1.0, 2.0], help="streams per second")
    parser.add_argument("--seconds", type=positive, default=30.0, help="seconds for which streams arrive at each rate")
    parser.add_argument("--stream-prompt-tokens", type=count, default=64)
    parser.add_argument("--stream-output-tokens", type=at_least(2), default=64)
    parser.add_argument("--burst-period", type=positive, default=5.0, help="seconds between bursts")
    parser.add_argument("--burst-share", type=positive, default=0.4, help="number of long prompts per stream")
    parser.add_argument("--burst-prompt-tokens", type=count, default=1024)
    parser.add_argument("--burst-output-tokens", type=count, default=8)
    parser.add_argument(
        "--small-chunk", type=count, default=128, help="token budget of a step for the side single_small"
    )
    parser.add_argument(
        "--queue-lead", type=count, default=4096, help="router.max_prefill_queue_lead for the side disagg_lead"
    )
    parser.add_argument("--max-model-len", type=count, default=2048)
    parser.add_argument("--ttft-limit-ms", type=positive, default=4000.0)
    parser.add_argument("--itl-limit-ms", type=positive, default=150.0)
    add_matrix_options(parser)
    add_json_option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = args.model
        if model is None:
            model = Path(directory)
            write_random_llama(model, torch.bfloat16)
        if args.matrix:
            run_matrix(model, args)
            return
        rows = [row for name in (DISAGG, DISAGG_LEAD, SINGLE, SINGLE_SMALL, TWO) for row in measure(name, model, args)]
    rows.extend(ratio_rows(rows, args.rates))
    title = "prefill and decode apart and together, two threads in all"
    publish(rows, packages=("torch", "ray", "nixl"), json_file=args.json, title=title)


if __name__ == "__main__":
    main()
