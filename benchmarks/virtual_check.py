"""How far virtual runs are from real ones: the cells that ``benchmarks.disagg --matrix`` measured, simulated.

    python -m benchmarks.disagg --matrix --cell-seconds 15 --json real.json
    python -m benchmarks.virtual_check --real real.json --cell-seconds 15

The same requests, at the same times, go to virtual workers of the same layouts. ``error/<figure>/<layout>/<cell>`` is
the virtual figure over the real one, less 1, with both; ``error/<figure>/mean`` and ``.../worst`` are of all cells, by
their size. Steps take what deployed workers fitted to their own steps (``--prices FILE``: in another run), or what
``--machines`` say (benchmarks.virtual_fit). What the router adds to a first token is fitted to ``--overhead-cell``, where workers are seldom busy.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

from benchmarks.arguments import count, positive
from benchmarks.disagg_parts.cells import ALL_CELLS, Cell
from benchmarks.disagg_parts.layouts import APART, ONE, ONE_SMALL, TWO
from benchmarks.report import Row, add_json_option, publish
from engine.contract.promise import Promise
from engine.contract.step_time import StepTimeModel
from simulation.cluster import simulate
from simulation.layout import SMALL_CHUNK, Layout, apart, unified
from simulation.machine import CPU_CORE, Machine, MachineFileError, load_machine
from simulation.outcome import Figures, figures

COMPARED = ("ttft_p50_ms", "ttft_p90_ms", "itl_p50_ms", "itl_p99_ms", "goodput")


def layouts_of(one_thread: Machine, two_threads: Machine, small_chunk: int) -> dict[str, Layout]:
    """The layouts of two threads, virtually."""
    return {
        APART: apart(1, 1, one_thread),
        ONE: unified(1, two_threads),
        ONE_SMALL: unified(1, two_threads, chunk=small_chunk),
        TWO: unified(2, one_thread),
    }


def real_values(file: Path) -> dict[str, float]:
    """The rows of a real run, by name.

    Raises:
        SystemExit: They are not there.
    """
    try:
        return {row["name"]: row["value"] for row in json.loads(file.read_text())}
    except OSError as error:
        raise SystemExit(f"--real {file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise SystemExit(f"--real {file} has no rows of a benchmark: {error!r}") from error


def predict(layout: Layout, cell: Cell, capacity: Mapping[str, float], args: argparse.Namespace) -> Figures:
    """What a layout makes of a cell, virtually."""
    run = simulate(layout, cell.load(capacity, seconds=args.cell_seconds))
    return figures(run.outcomes, Promise(ttft_ms=args.ttft_limit_ms, itl_ms=args.itl_limit_ms))


def with_overhead(machine: Machine, seconds: float) -> Machine:
    """The machine behind a router that takes so much longer until a request is accepted."""
    router = replace(machine.router, accept_s=max(machine.router.accept_s + seconds, 0.0))
    return replace(machine, router=router)


def deployed_step_time(real: Mapping[str, float], layout: str, role: str) -> StepTimeModel:
    """The prices that a deployed worker of a role fitted to its own steps: of several the one that made most steps.

    Raises:
        SystemExit: None did.
    """
    names = {name.rpartition("/")[2] for name in real if name.startswith(f"worker/num_steps/{layout}/{role}-")}
    if not names:
        raise SystemExit(f"--prices of {layout}: the file has no {role} worker with step times")
    worker = max(names, key=lambda name: real[f"worker/num_steps/{layout}/{name}"])
    prices = {item.name: real[f"worker/{item.name}/{layout}/{worker}"] for item in fields(StepTimeModel)}
    return StepTimeModel(**prices | {"num_steps": int(prices["num_steps"])})  # type: ignore[arg-type]


def machines_of(args: argparse.Namespace) -> tuple[Machine, Machine]:
    """A worker of one thread, and one of two: from files, or as deployed workers measured themselves.

    Raises:
        SystemExit: They are not there.
    """
    if args.machines is not None:
        try:
            one, two = map(load_machine, args.machines)
        except MachineFileError as error:
            raise SystemExit(f"--machines: {error}") from error
        return one, two
    prices = real_values(args.prices or args.real)
    noise = replace(CPU_CORE, shared_step_time=None, step_noise=0.1)
    return (
        replace(noise, name="one_thread", step_time=deployed_step_time(prices, TWO, "decode")),
        replace(noise, name="two_threads", step_time=deployed_step_time(prices, ONE, "decode")),
    )


def error_row(figure: str, place: str, virtual: float, real: float) -> Row:
    """One figure of one cell."""
    return Row(
        name=f"error/{figure}/{place}",
        value=100 * (virtual / real - 1),
        unit="percent",
        detail={"real": real, "virtual": virtual},
    )


def summary_rows(rows: list[Row]) -> list[Row]:
    """Mean and worst of each figure over all cells."""
    out: list[Row] = []
    for figure in COMPARED:
        sizes = [abs(row.value) for row in rows if row.name.startswith(f"error/{figure}/")]
        out.append(Row(name=f"error/{figure}/mean", value=statistics.fmean(sizes), unit="percent"))
        out.append(Row(name=f"error/{figure}/worst", value=max(sizes), unit="percent"))
    return out


def main() -> None:
    """Simulate what was measured, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=Path, required=True, help="the rows of a real matrix")
    parser.add_argument("--machines", type=Path, nargs=2, help="a worker of one thread, and one of two")
    parser.add_argument(
        "--prices", type=Path, help="without --machines: rows of a matrix whose workers' prices to take"
    )
    parser.add_argument("--cell-seconds", type=positive, required=True, help="as in the real run")
    parser.add_argument("--overhead-cell", default="low/balanced/steady", help="fits what the router adds")
    parser.add_argument("--small-chunk", type=count, default=SMALL_CHUNK)
    parser.add_argument("--ttft-limit-ms", type=positive, default=2000.0)
    parser.add_argument("--itl-limit-ms", type=positive, default=100.0)
    add_json_option(parser)
    args = parser.parse_args()
    one_thread, two_threads = machines_of(args)
    real = real_values(args.real)
    capacity = {name.removeprefix("capacity/"): value for name, value in real.items() if name.startswith("capacity/")}
    layouts = layouts_of(one_thread, two_threads, args.small_chunk)
    measured = [(name, cell) for name in layouts for cell in ALL_CELLS if f"{name}/goodput/{cell.name}" in real]
    if not measured or not capacity:
        raise SystemExit(f"--real {args.real} has no cell of a matrix with its capacity")
    quiet = next((cell for _, cell in measured if cell.name == args.overhead_cell), measured[0][1])
    lacks = [
        real[f"{name}/ttft_p50_ms/{quiet.name}"] - predict(layout, quiet, capacity, args).ttft_p50_ms
        for name, layout in layouts.items()
        if f"{name}/goodput/{quiet.name}" in real
    ]
    overhead_s = statistics.median(lacks) / 1e3
    layouts = layouts_of(
        with_overhead(one_thread, overhead_s), with_overhead(two_threads, overhead_s), args.small_chunk
    )
    rows: list[Row] = []
    for name, cell in measured:
        values = predict(layouts[name], cell, capacity, args).values()
        rows += [
            error_row(figure, f"{name}/{cell.name}", values[figure], real[f"{name}/{figure}/{cell.name}"])
            for figure in COMPARED
        ]
    rows += [*summary_rows(rows), Row(name="router/overhead", value=overhead_s * 1e3, unit="ms")]
    publish(rows, packages=("numpy",), json_file=args.json, title="virtual runs beside real ones")


if __name__ == "__main__":
    main()
