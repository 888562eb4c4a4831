"""A pool that follows the promise, compared with every fixed size: real clusters, and the same in virtual time.

    python -m benchmarks.promise_scaling_real --json benchmarks/results/promise_scaling_real.json

A cluster of its own for each size: real routers, workers, starts and drains over Ray Serve, asked over HTTP. Its
workers make the steps of a ``--machine`` (:mod:`benchmarks.scaling_parts.paced_worker`), so that one to four of them
on a host of few cores are as fast as on hosts of their own; what starts a worker is a real start, beside those that
serve. They compute the prompts of their own requests. The load is one day of ``benchmarks.promise_scaling --mix``:
its rate goes from ``--low`` of the ``--peak`` to that and back. The best fixed size is the fewest workers that attain
the target, or if none does those that attain the most.

Rows, each with ``real`` and ``virtual`` in front: ``<which>/attainment/fixed=<n>/<load>``, ``.../worker_hours/...``,
the same of ``promise``, ``<which>/gain/<load>`` and ``<which>/hours_ratio/<load>`` over the best fixed size, and
``<which>/changes/<load>``, whose detail has each.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.arguments import at_least, count, positive
from benchmarks.promise_scaling import HOUR_S, Changes, Result, attainment, compare, daily_load, virtual_changes
from benchmarks.random_llama import write_small_llama
from benchmarks.report import Row, add_json_option, publish
from benchmarks.scaling_parts.real import ROLE, serve
from engine.contract.promise import Promise
from router.scaling_rules import PoolBounds, ScalingRules
from simulation.cluster import simulate
from simulation.layout import unified
from simulation.loads import MIXES, Arrival
from simulation.machine import MACHINES
from simulation.scaled import simulate_scaled
from simulation.whatif.source import warm_up_of


class Sides:
    """The same load in virtual time and by real clusters."""

    def __init__(self, load: Sequence[Arrival], model: Path, args: argparse.Namespace) -> None:
        self._load = load
        self._warm_up = warm_up_of(load)
        self._model = model
        self._machine = MACHINES[args.machine]
        self._promise = Promise(ttft_ms=args.ttft_ms, itl_ms=args.itl_ms)
        self._start_s = args.start_up
        self._rules = ScalingRules(
            pools={ROLE: PoolBounds(least=1, most=max(args.sizes))},
            target=args.target,
            window_s=args.window,
            hold_s=args.hold,
            start_s=args.start_up,
        )

    def virtual(self, num_workers: int | None) -> tuple[Result, Changes]:
        """Serve with this many workers, or (None) with as many as the promise needs."""
        layout = replace(unified(num_workers or 1, self._machine), promise=self._promise)
        if num_workers is not None:
            run = simulate(layout, self._load, warm_up=self._warm_up)
            worker_s = num_workers * (run.virtual_s - run.started_s)
            return Result(attainment=attainment(run.outcomes, self._promise), worker_hours=worker_s / HOUR_S), ()
        scaled = simulate_scaled(layout, self._load, self._rules, start_s=self._start_s, warm_up=self._warm_up)
        kept = attainment(scaled.outcomes, self._promise)
        return Result(attainment=kept, worker_hours=scaled.worker_s / HOUR_S), virtual_changes(scaled)

    def real(self, num_workers: int | None) -> tuple[Result, Changes]:
        """The same with real clusters."""
        run = serve(
            self._model,
            self._machine,
            self._promise,
            self._load,
            num_workers=num_workers or 1,
            rules=self._rules if num_workers is None else None,
            warm_up=self._warm_up,
        )
        failed = [outcome.error for outcome in run.outcomes if outcome.error is not None]
        if failed:
            raise SystemExit(f"{len(failed)} requests failed; the first: {failed[0]}")
        kept = attainment(run.outcomes, self._promise)
        return Result(attainment=kept, worker_hours=run.worker_s / HOUR_S), run.changes


def main() -> None:
    """Simulate, serve, publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", choices=tuple(MIXES), default="prompt_heavy")
    parser.add_argument("--peak", type=positive, default=4.2, help="requests per second at the peak")
    parser.add_argument("--low", type=positive, default=0.05)
    parser.add_argument("--seconds", type=positive, default=480.0, help="seconds of a day")
    parser.add_argument(
        "--sharpness", type=positive, default=4.0, help="sharpness of the peak; higher values make it shorter"
    )
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--machine", choices=tuple(MACHINES), default="cpu_core")
    parser.add_argument("--ttft-ms", type=positive, default=3000.0)
    parser.add_argument("--itl-ms", type=positive, default=1000.0)
    parser.add_argument("--target", type=positive, default=0.99)
    parser.add_argument("--window", type=positive, default=40.0)
    parser.add_argument("--hold", type=positive, default=30.0)
    parser.add_argument("--start-up", type=positive, default=10.0, help="assumed start time of a worker in seconds")
    parser.add_argument("--sizes", type=count, nargs="+", default=[2, 3, 4])
    parser.add_argument("--only", choices=("virtual", "real"), help="measure only one of the two sides")
    add_json_option(parser)
    args = parser.parse_args()
    load = daily_load(
        args.mix,
        peak=args.peak,
        low=args.low,
        period_s=args.seconds,
        seconds=args.seconds,
        sharpness=args.sharpness,
        seed=args.seed,
    )
    name = f"daily/{args.mix}/seed={args.seed}"
    print(f"{name}: {len(load)} requests", flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        write_small_llama(Path(folder), torch.float32)
        sides = Sides(load, Path(folder), args)
        for which, measure in (("virtual", sides.virtual), ("real", sides.real)):
            if args.only in (None, which):
                rows += compare(name, args.sizes, measure, target=args.target, which=f"{which}/")
    publish(
        rows, packages=("ray", "torch", "nixl"), json_file=args.json, title="a pool that follows the promise, for real"
    )


if __name__ == "__main__":
    main()
