"""The regret matrix in virtual time: the real router and scheduler, any number of workers whose steps only take time.

    python -m benchmarks.virtual_cluster --workers 4 16 --machine cpu_core --json benchmarks/results/virtual.json
    python -m benchmarks.virtual_cluster --workers 16 --trace mooncake-conversation-trace.jsonl --trace-scale 32

For every cell (as of ``benchmarks.disagg --matrix``) the best fixed layout is searched: every ratio of prefill to
decode workers (beyond 16 workers some, and then those around the best), ``unified`` (each worker computes its own
prompts) and ``unified_chunk_128``; where workers share cores, fixed ones keep to their own, or one a host has all. With
``--trace`` the load is a recorded one (its format: see benchmarks/routing.py), so fast that the workers would be busy
with prompts for ``--trace-load`` of their time if nothing were cached. Rows:
``best/<figure>/workers=<n>/<cell>``, whose detail names the layout, ``<layout>/goodput/...`` and ``.../itl_p99_ms/...``
of all that was tried, and ``speed/...``: simulated seconds in a second.

    python -m benchmarks.virtual_cluster --elastic --workers 4 --cells 'mid/*/steady' --seeds 3
    python -m benchmarks.virtual_cluster --elastic --workers 2 --machine benchmarks/disagg_parts/matrix_host.json
    python -m benchmarks.virtual_cluster --elastic --workers 16 --machine h200 --trace FILE --trace-load 0.9

``--elastic`` compares instead: ``regret/goodput/<place>`` is the goodput of as many workers with elastic roles, whose
requests are promised both limits, over that of the best fixed layout of the very same requests; the place without a
seed has the sums of all seeds. With ``--routers 3`` so many place the requests of elastic roles. Workers with elastic
roles learn what steps take from ``--warm-up`` seconds of other requests; with fixed ones nothing is learnt. ``--load``
replaces the share of capacity that cells name.
``matrix_host.json`` is a host of two cores as the workers of ``benchmarks.disagg --matrix`` fitted it: one with both
cores, and two with one each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.arguments import at_least, count, positive
from benchmarks.disagg_parts.cells import LEVELS, Cell, cells_named, figure_rows
from benchmarks.report import Row, add_json_option, kept_rows, publish
from engine.contract.promise import Promise
from simulation.capacity import measure_capacity
from simulation.cluster import Run, simulate
from simulation.layout import Layout, elastic
from simulation.loads import Arrival, LoadError, LoadSpec, duration_s, make_load, read_trace
from simulation.machine import MACHINES, Machine, MachineFileError, load_machine
from simulation.outcome import Figures, figures
from simulation.search import best_fixed

SEED_STEP = 1000
"""Cells are numbered below that."""

WARM_UP_SEED = 999
Load = Sequence[Arrival]


@dataclass(slots=True, kw_only=True)
class Stopwatch:
    """How much was simulated, and how long that took."""

    virtual_s: float = 0.0
    took_s: float = 0.0

    def add(self, run: Run) -> None:
        """Count a run."""
        self.virtual_s += run.virtual_s
        self.took_s += run.took_s


def judge_of(arrivals: Sequence[Arrival], promise: Promise, watch: Stopwatch) -> Callable[[Layout], Figures]:
    """A function that returns the figures of a layout under a load."""

    def judge(layout: Layout) -> Figures:
        run = simulate(layout, arrivals)
        watch.add(run)
        found = figures(run.outcomes, promise, busy_s=run.busy_s)
        print(f"  {layout.name}: goodput {found.goodput:.3f}, {found.share_good:.1f} % good", flush=True)
        return found

    return judge


def cell_result(
    name: str, num_workers: int, machine: Machine, arrivals: Sequence[Arrival], promise: Promise
) -> list[Row]:
    """The rows of a search for the best fixed layout of a load."""
    watch = Stopwatch()
    print(f"{name}: {len(arrivals)} requests, {num_workers} workers", flush=True)
    search = best_fixed(num_workers, machine, judge_of(arrivals, promise, watch))
    place = f"workers={num_workers}/{name}"
    rows = figure_rows("best", place, search.figures)
    for row in rows:
        row.detail["layout"] = search.best.name
    for layout, found in search.tried.items():
        rows.append(Row(name=f"{layout}/goodput/{place}", value=found.goodput, unit="requests/s"))
        rows.append(Row(name=f"{layout}/itl_p99_ms/{place}", value=found.itl_p99_ms, unit="ms"))
    rows.append(Row(name=f"speed/{place}", value=watch.virtual_s / watch.took_s, unit="x"))
    return rows


def elastic_result(
    name: str, layout: Layout, machine: Machine, loads: Sequence[Sequence[Arrival]], promise: Promise, warm_up: Load
) -> list[Row]:
    """Elastic roles beside the best fixed layout of each load, with one router; and of all of them."""
    rows: list[Row] = []
    num_workers, sums = layout.num_workers, {"elastic": 0.0, "best": 0.0}
    size = (
        f"workers={num_workers}" if layout.num_routers == 1 else f"workers={num_workers}/routers={layout.num_routers}"
    )
    for seed, arrivals in enumerate(loads, start=1):
        place = f"{size}/{name}/seed={seed}"
        print(f"{place}: {len(arrivals)} requests", flush=True)
        run = simulate(layout, arrivals, warm_up=warm_up)
        own = figures(run.outcomes, promise, busy_s=run.busy_s)
        best = best_fixed(num_workers, machine, judge_of(arrivals, promise, Stopwatch()))
        sums["elastic"] += own.goodput
        sums["best"] += best.figures.goodput
        detail: dict[str, float | str] = {
            "best": best.best.name,
            "goodput": own.goodput,
            "best_goodput": best.figures.goodput,
        }
        detail |= {
            "share_good": own.share_good,
            "itl_p99_ms": own.itl_p99_ms,
            "best_itl_p99_ms": best.figures.itl_p99_ms,
        }
        rows.append(regret_row(place, own.goodput, best.figures.goodput, detail))
    rows.append(regret_row(f"{size}/{name}", sums["elastic"], sums["best"], {}))
    return rows


def regret_row(place: str, own: float, best: float, detail: dict[str, float | str]) -> Row:
    """A goodput over the best one; nothing is as good as nothing."""
    value = own / best if best else 1.0
    print(f"  {place}: {value:.3f} of the best", flush=True)
    return Row(name=f"regret/goodput/{place}", value=value, unit="x", detail=detail)


def num_machines(machine: Machine, num_workers: int) -> float:
    """How many times one worker's capacity so many have, which has all cores of its host while it is alone."""
    return num_workers / (machine.workers_per_host if machine.shares_cores else 1)


def loads_of(cell: Cell, args: argparse.Namespace, capacity: Mapping[str, float], num_workers: int) -> list[Load]:
    """A cell's requests by each seed, the first of which is its own."""
    scale = num_machines(args.machine, num_workers) * (args.load / LEVELS[cell.level] if args.load else 1.0)
    seeded = [replace(cell, part=cell.part + SEED_STEP * number) for number in range(args.seeds)]
    return [one.load(capacity, seconds=args.cell_seconds, scale=scale) for one in seeded]


def warm_up_load(args: argparse.Namespace, capacity: Mapping[str, float], num_workers: int) -> Load:
    """What workers learn from: requests of the balanced mix, half of what can be served."""
    if not args.warm_up:
        return []
    rates = {"balanced": capacity["balanced"] * num_machines(args.machine, num_workers) / 2}
    return make_load(LoadSpec(mix="balanced", shape="steady", rates=rates, seconds=args.warm_up, seed=WARM_UP_SEED))


def trace_load(args: argparse.Namespace, machine: Machine, num_workers: int) -> list[Arrival]:
    """The recorded load, at the speed that was asked for."""
    try:
        recorded = read_trace(args.trace, num_requests=args.trace_requests, scale=args.trace_scale)
    except LoadError as error:
        raise SystemExit(f"--trace: {error}") from error
    longest = max(len(arrival.prompt) + arrival.num_output_tokens for arrival in recorded)
    if longest > machine.max_model_len:
        raise SystemExit(
            f"the trace has requests of {longest} tokens, {machine.name} takes {machine.max_model_len}: give a larger "
            "--trace-scale or another --machine"
        )
    busy_s = sum(machine.step_time.prompt_seconds(len(arrival.prompt)) for arrival in recorded) / num_workers
    speed = args.trace_load * duration_s(recorded) / busy_s
    return read_trace(args.trace, num_requests=args.trace_requests, scale=args.trace_scale, speed=speed)


def named_loads(
    args: argparse.Namespace, capacity: Mapping[str, float], num_workers: int
) -> Iterator[tuple[str, list[Load]]]:
    """The loads to serve, and their names: the recorded one, or that of each cell by each seed."""
    if args.trace is not None:
        yield f"trace/load={args.trace_load:g}", [trace_load(args, args.machine, num_workers)]
        return
    for cell in cells_named(args.cells):
        name = f"{cell.name}/load={args.load:g}" if args.elastic and args.load else cell.name
        yield name, loads_of(cell, args, capacity, num_workers)


def machine_named(text: str) -> Machine:
    """A machine by its name, or by its file."""
    if text in MACHINES:
        return MACHINES[text]
    try:
        return load_machine(Path(text))
    except MachineFileError as error:
        raise argparse.ArgumentTypeError(f"{error}; known names: {', '.join(MACHINES)}") from error


def main() -> None:
    """Simulate and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=at_least(2), nargs="+", default=[4, 16], help="numbers of workers")
    parser.add_argument("--machine", type=machine_named, default="cpu_core", help="name, or file of virtual_fit")
    parser.add_argument("--cells", nargs="+", default=["*"], metavar="PATTERN", help="such as low/*/steady")
    parser.add_argument("--cell-seconds", type=positive, default=20.0, help="seconds of arrivals per cell")
    parser.add_argument("--elastic", action="store_true", help="compare elastic roles with the best fixed layout")
    parser.add_argument("--seeds", type=count, default=1, help="with --elastic: number of random draws of each cell")
    parser.add_argument("--load", type=positive, help="load as a share of the capacity, instead of the cells' own")
    parser.add_argument("--routers", type=count, default=1, help="with --elastic: number of routers")
    parser.add_argument("--warm-up", type=at_least(0), default=10, help="with --elastic: seconds of load before")
    parser.add_argument("--trace", type=Path, help="file of a recorded load to serve instead of cells")
    parser.add_argument("--trace-requests", type=count, default=2000, help="number of requests of the recorded load")
    parser.add_argument("--trace-scale", type=count, default=1, help="divide the lengths of the recorded load by this")
    parser.add_argument("--trace-load", type=positive, default=0.6, help="share of prompts in time without caching")
    parser.add_argument("--ttft-limit-ms", type=positive, default=2000.0)
    parser.add_argument("--itl-limit-ms", type=positive, default=100.0)
    parser.add_argument("--merge", action="store_true", help="keep the other rows of --json FILE")
    add_json_option(parser)
    args = parser.parse_args()
    if args.seeds > 1 and not args.elastic:
        parser.error("--seeds needs --elastic: the best fixed layout is searched for one load only")
    if args.routers > 1 and not args.elastic:
        parser.error("--routers needs --elastic: the search for the best fixed layout uses one router only")
    if args.trace and args.seeds > 1:
        parser.error("--seeds needs cells: a recorded load has one draw only")
    promise = Promise(ttft_ms=args.ttft_limit_ms, itl_ms=args.itl_limit_ms)
    rows: list[Row] = []
    capacity = {} if args.trace and not args.elastic else measure_capacity(args.machine)
    rows.extend(Row(name=f"capacity/{mix}", value=rate, unit="requests/s") for mix, rate in capacity.items())
    for num_workers in args.workers:
        for name, loads in named_loads(args, capacity, num_workers):
            if args.elastic:
                warm_up = warm_up_load(args, capacity, num_workers)
                layout = replace(elastic(num_workers, args.machine, promise), num_routers=args.routers)
                rows.extend(elastic_result(name, layout, args.machine, loads, promise, warm_up))
            else:
                rows.extend(cell_result(name, num_workers, args.machine, loads[0], promise))
    kept = kept_rows(args.json) if args.merge else []
    publish(rows, packages=("numpy",), json_file=args.json, title="virtual clusters", kept=kept)


if __name__ == "__main__":
    main()
