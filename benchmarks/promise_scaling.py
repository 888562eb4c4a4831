"""Pools that follow the promises, compared with every fixed size, in virtual time: with the real router, scheduler and
policy.

    python -m benchmarks.promise_scaling --trace mooncake-conversation-trace.jsonl --machine gpu --ttft-ms 10000
    python -m benchmarks.promise_scaling --mix prompt_heavy --peak 4 --json benchmarks/results/promise_scaling.json

The load is a stretch of a recorded trace (``--seconds`` from ``--start-s`` on, ``--speed`` times as fast, lengths
divided by ``--scale``; with ``--daily`` thinned out to the course of a day), or (``--mix``) requests at random times.
A day goes from ``--low`` of the ``--peak`` rate to that and back in each ``--period``, along a cosine to the power of
``--sharpness``. Fixed sizes, elastic roles of ``--sizes`` workers, serve the same requests. The best fixed size is the
fewest workers that attain the target, or if none does those that attain the most. Workers that are ordered take
``--start-up`` seconds to be there, and cost from the order on until they are drained.

Rows: ``attainment/fixed=<n>/<load>`` and ``worker_hours/...``, the same of ``promise``, ``gain/<load>`` and
``hours_ratio/<load>`` over the best fixed size, and ``changes/<load>``, whose detail has each. A load is
``<course>/seed=<n>``, and ``<course>/all`` is the mean of all draws (``--seeds``), beside the one fixed size that is
best for all of them.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.arguments import at_least, count, positive
from benchmarks.report import Row, add_json_option, kept_rows, publish
from benchmarks.virtual_cluster import machine_named
from engine.contract.promise import Promise
from router.scaling_rules import PoolBounds, ScalingRules
from simulation.cluster import simulate
from simulation.layout import elastic
from simulation.loads import MIXES, Arrival, LoadError
from simulation.machine import Machine
from simulation.outcome import Outcome
from simulation.scaled import ScaledRun, simulate_scaled
from simulation.whatif.source import TraceSource, warm_up_of

HOUR_S = 3600.0
VOCAB_SIZE = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The share of requests that kept the promise, and the cost of the workers."""

    attainment: float
    worker_hours: float


Changes = Sequence[str]
Measure = Callable[[int | None], tuple[Result, Changes]]
"""Serves a load with this many workers, or (None) with as many as the promise needs; also returns the changes of size.
"""


def daily_load(
    mix: str, *, peak: float, low: float, period_s: float, seconds: float, sharpness: float = 1.0, seed: int = 0
) -> list[Arrival]:
    """Requests whose rate follows a cosine from ``low`` of the peak to the peak and back in each period."""
    source = random.Random(f"{mix}/daily/{seed}")
    arrivals: list[Arrival] = []
    at_s = source.expovariate(peak)
    while at_s < seconds:
        if source.random() < daily_share(at_s, low=low, period_s=period_s, sharpness=sharpness):
            arrivals.append(MIXES[mix].draw(at_s, source, VOCAB_SIZE))
        at_s += source.expovariate(peak)
    return arrivals


def daily_share(at_s: float, *, low: float, period_s: float, sharpness: float) -> float:
    """The rate at a time, as a share of the peak rate."""
    height = (1.0 - math.cos(2.0 * math.pi * at_s / period_s)) / 2.0
    return low + (1.0 - low) * height**sharpness


def thinned(load: Sequence[Arrival], *, low: float, period_s: float, sharpness: float, seed: int = 0) -> list[Arrival]:
    """A random part of the requests, thinned out so that an even load rises and falls over the day."""
    source = random.Random(f"thinned/{seed}")
    return [
        item
        for item in load
        if source.random() < daily_share(item.at_s, low=low, period_s=period_s, sharpness=sharpness)
    ]


def attainment(outcomes: Sequence[Outcome], promise: Promise) -> float:
    """The share of requests that kept the promise."""
    return sum(outcome.keeps(promise) for outcome in outcomes) / len(outcomes)


def fixed_result(num_workers: int, machine: Machine, promise: Promise, load: Sequence[Arrival]) -> Result:
    """The result of a load with a fixed number of workers."""
    run = simulate(elastic(num_workers, machine, promise), load, warm_up=warm_up_of(load))
    seconds = run.virtual_s - run.started_s
    return Result(attainment=attainment(run.outcomes, promise), worker_hours=num_workers * seconds / HOUR_S)


def best_fixed(results: dict[int, Result], *, target: float) -> int:
    """The fewest workers that attain the target; if none does, the fewest workers with the highest attainment."""
    keeping = [number for number, result in results.items() if result.attainment >= target]
    return min(keeping) if keeping else max(results, key=lambda number: (results[number].attainment, -number))


def rules_of(args: argparse.Namespace) -> ScalingRules:
    """The rules of both pools, each of which may have at most half of the largest number of workers."""
    most = args.max_workers
    bounds = {"prefill": PoolBounds(least=1, most=most // 2), "decode": PoolBounds(least=1, most=most - most // 2)}
    return ScalingRules(pools=bounds, target=args.target, window_s=args.window, hold_s=args.hold, start_s=args.start_up)


def virtual_changes(run: ScaledRun) -> Changes:
    """The changes of size, with their times and reasons."""
    return [
        f"{note.changed_at_s - run.started_s:.0f} s: {note.role} {note.before} -> {note.wanted}, {note.reason}"
        for note in run.notes
    ]


def compare(name: str, sizes: Sequence[int], measure: Measure, *, target: float, which: str = "") -> list[Row]:
    """The rows of one load, from the results of each fixed size and of following the promise; their names begin with
    ``which``.
    """
    rows: list[Row] = []

    def add(kind: str, result: Result) -> None:
        print(f"  {which}{kind}: {result.attainment:.2%} kept, {result.worker_hours:.4f} worker hours", flush=True)
        rows.append(Row(name=f"{which}attainment/{kind}/{name}", value=100 * result.attainment, unit="%"))
        rows.append(Row(name=f"{which}worker_hours/{kind}/{name}", value=result.worker_hours, unit="h"))

    results: dict[int, Result] = {}
    for number in sizes:
        results[number], _ = measure(number)
        add(f"fixed={number}", results[number])
    own, changes = measure(None)
    add("promise", own)
    best = best_fixed(results, target=target)
    ratio = own.worker_hours / results[best].worker_hours
    gain = 100 * (own.attainment - results[best].attainment)
    print(f"  beside the best fixed size ({best}): {gain:+.2f} points, {ratio:.3f} of its worker hours", flush=True)
    for line in changes:
        print(f"  {line}")
    rows.append(Row(name=f"{which}gain/{name}", value=gain, unit="points", detail={"best_fixed": best}))
    rows.append(Row(name=f"{which}hours_ratio/{name}", value=ratio, unit="x", detail={"best_fixed": best}))
    told: dict[str, float | str] = {f"{number:03}": line for number, line in enumerate(changes)}
    rows.append(Row(name=f"{which}changes/{name}", value=float(len(changes)), unit="", detail=told))
    return rows


def virtual_measure(load: Sequence[Arrival], args: argparse.Namespace) -> Measure:
    """A measure that simulates elastic roles."""
    promise = Promise(ttft_ms=args.ttft_ms, itl_ms=args.itl_ms)

    def measure(num_workers: int | None) -> tuple[Result, Changes]:
        if num_workers is not None:
            return fixed_result(num_workers, args.machine, promise, load), ()
        first = elastic(args.first, args.machine, promise)
        run = simulate_scaled(first, load, rules_of(args), start_s=args.start_up, warm_up=warm_up_of(load))
        result = Result(attainment=attainment(run.outcomes, promise), worker_hours=run.worker_s / HOUR_S)
        return result, virtual_changes(run)

    return measure


def trace_load(args: argparse.Namespace, *, seed: int) -> list[Arrival]:
    """The requested part of the trace, without requests that are too large for the machine's workers."""
    source = TraceSource(
        file=args.trace, start_s=args.start_s, seconds=args.seconds, speed=args.speed, scale=args.scale
    )
    try:
        recorded = source.load()
    except LoadError as error:
        raise SystemExit(f"--trace: {error}") from error
    if args.daily:
        recorded = thinned(recorded, low=args.low, period_s=args.period, sharpness=args.sharpness, seed=seed)
    most = args.machine.max_model_len
    kept = [arrival for arrival in recorded if len(arrival.prompt) + arrival.num_output_tokens <= most]
    if len(kept) < len(recorded):
        print(f"{len(recorded) - len(kept)} of {len(recorded)} requests have more than {most} tokens: left out")
    return kept


def load_of(args: argparse.Namespace, *, seed: int) -> list[Arrival]:
    """One random draw of the requested load."""
    if args.trace is not None:
        return trace_load(args, seed=seed)
    return daily_load(
        args.mix,
        peak=args.peak,
        low=args.low,
        period_s=args.period,
        seconds=args.seconds,
        sharpness=args.sharpness,
        seed=seed,
    )


def course_of(args: argparse.Namespace) -> str:
    """The name of the requested load, whichever draw of it."""
    if args.trace is None:
        return f"daily/{args.mix}"
    course = "daily/" if args.daily else ""
    return f"{course}trace/{args.start_s:g}+{args.seconds:g}/speed={args.speed:g}"


def over_all_draws(
    rows: Sequence[Row], course: str, sizes: Sequence[int], *, num_draws: int, target: float
) -> list[Row]:
    """The means over all draws of a load, beside the best of the sizes that stay the same whichever draw comes."""
    values = {row.name: row.value for row in rows}

    def mean(kind: str) -> Result:
        attained, hours = (
            [values[f"{what}/{kind}/{course}/seed={seed}"] for seed in range(num_draws)]
            for what in ("attainment", "worker_hours")
        )
        return Result(attainment=sum(attained) / num_draws / 100, worker_hours=sum(hours) / num_draws)

    results: dict[int | None, Result] = {number: mean(f"fixed={number}") for number in sizes}
    results[None] = mean("promise")
    print(f"{course}, the mean of {num_draws} draws:", flush=True)
    compared = compare(f"{course}/all", sizes, lambda number: (results[number], ()), target=target)
    return [row for row in compared if not row.name.startswith("changes/")]


def main() -> None:
    """Simulate and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="file of a recorded load")
    parser.add_argument("--start-s", type=at_least(0), default=0.0)
    parser.add_argument("--speed", type=positive, default=1.0)
    parser.add_argument("--scale", type=count, default=1)
    parser.add_argument(
        "--daily", action="store_true", help="drop requests of the trace, so that its rate varies like over a day"
    )
    parser.add_argument("--mix", choices=tuple(MIXES), help="mix of a generated load that rises and falls")
    parser.add_argument("--peak", type=positive, default=4.0, help="requests per second at the peak")
    parser.add_argument("--low", type=positive, default=0.2)
    parser.add_argument("--period", type=positive, default=600.0, help="seconds")
    parser.add_argument(
        "--sharpness", type=positive, default=1.0, help="sharpness of the peak; higher values make it shorter"
    )
    parser.add_argument("--seconds", type=positive, default=1200.0)
    parser.add_argument("--seeds", type=count, default=1, help="number of random draws of the load")
    parser.add_argument(
        "--machine",
        type=machine_named,
        default="cpu_core",
        help="name of a machine, or a file of benchmarks.virtual_fit",
    )
    parser.add_argument("--ttft-ms", type=positive, default=2000.0)
    parser.add_argument("--itl-ms", type=positive, default=100.0)
    parser.add_argument("--target", type=positive, default=0.99)
    parser.add_argument("--window", type=positive, default=60.0)
    parser.add_argument("--hold", type=positive, default=120.0)
    parser.add_argument("--start-up", type=positive, default=10.0, help="seconds that a worker needs to start")
    parser.add_argument("--sizes", type=at_least(2), nargs="+", default=[2, 3, 4, 5, 6])
    parser.add_argument("--first", type=at_least(2), default=2, help="number of workers at the start")
    parser.add_argument("--max-workers", type=at_least(2), default=8)
    parser.add_argument("--merge", action="store_true", help="keep the other rows of --json FILE")
    add_json_option(parser)
    args = parser.parse_args()
    if (args.trace is None) == (args.mix is None):
        parser.error("give exactly one of --trace and --mix")
    if args.trace is not None and not args.daily and args.seeds > 1:
        parser.error("--seeds needs --daily: nothing else is drawn of a trace")
    course = course_of(args)
    rows: list[Row] = []
    for seed in range(args.seeds):
        load = load_of(args, seed=seed)
        name = f"{course}/seed={seed}"
        print(f"{name}: {len(load)} requests", flush=True)
        rows += compare(name, args.sizes, virtual_measure(load, args), target=args.target)
    if args.seeds > 1:
        rows += over_all_draws(rows, course, args.sizes, num_draws=args.seeds, target=args.target)
    kept = kept_rows(args.json) if args.merge else []
    publish(rows, packages=("numpy",), json_file=args.json, title="pools that follow the promises", kept=kept)


if __name__ == "__main__":
    main()
