"""How far virtual runs are from real ones: the cells that ``benchmarks.disagg --matrix`` measured, simulated.

    python -m benchmarks.disagg --matrix --cell-seconds 15 --json real.json
    python -m benchmarks.virtual_check --real real.json --cell-seconds 15

The same requests, at the same times, go to virtual workers of the same layouts. ``error/<figure>/<layout>/<cell>`` is
the virtual figure over the real one, less 1, with both. Steps take what deployed workers fitted to their own steps
(``--prices FILE``: those of another run), or what ``--machines`` say (benchmarks.virtual_fit), and what deploying them
costs is fitted to one cell (``--fit-cell``): ``deployment/slowdown``, of all steps, by its median gap, and
``deployment/overhead``, of routers, by its median first token. ``error/<figure>/mean`` and ``.../worst`` are of all
other cells, by their size. ``--save`` writes the calibration that ``baton whatif`` reads: the decode worker of separate
pools as it is deployed, with these errors.
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
from simulation.whatif.calibration import FIGURES, Calibration, FigureError

PLACES = (f"{APART}/prefill", f"{APART}/decode", f"{ONE}/decode", f"{TWO}/decode")
PRICES = ("base_s", "row_s", "context_token_s", "prompt_token_s", "prompt_read_s")
COMPARED = FIGURES


def layouts_of(machines: Mapping[str, Machine], small_chunk: int) -> dict[str, Layout]:
    """The layouts of two threads, virtually; ``machines`` are by the place of a worker in them."""
    separate = apart(1, 1, machines[f"{APART}/decode"])
    prefill = replace(separate.prefill, machine=machines[f"{APART}/prefill"])
    return {
        APART: replace(separate, prefill=prefill),
        ONE: unified(1, machines[f"{ONE}/decode"]),
        ONE_SMALL: unified(1, machines[f"{ONE}/decode"], chunk=small_chunk),
        TWO: unified(2, machines[f"{TWO}/decode"]),
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


def capacity_of(real: Mapping[str, float]) -> dict[str, float]:
    """What the machine was found to serve of each mix."""
    return {name.removeprefix("capacity/"): value for name, value in real.items() if name.startswith("capacity/")}


def predict(layout: Layout, cell: Cell, capacity: Mapping[str, float], args: argparse.Namespace) -> Figures:
    """What a layout makes of a cell, virtually."""
    run = simulate(layout, cell.load(capacity, seconds=args.cell_seconds))
    return figures(run.outcomes, Promise(ttft_ms=args.ttft_limit_ms, itl_ms=args.itl_limit_ms))


def deployed(machine: Machine, *, slowdown: float, overhead_s: float) -> Machine:
    """The machine as a worker of a cluster, which shares its cores with routers, behind such a router."""
    router = replace(machine.router, accept_s=max(machine.router.accept_s + overhead_s, 0.0))
    prices = {name: slowdown * getattr(machine.step_time, name) for name in PRICES}
    return replace(machine, router=router, step_time=replace(machine.step_time, **prices))


def fit_deployment(
    machines: Mapping[str, Machine], cell: Cell, real: Mapping[str, float], args: argparse.Namespace
) -> tuple[dict[str, Machine], list[Row]]:
    """The machines with what deploying them costs, by one cell: their median gap, and then the median first token."""
    capacity = capacity_of(real)
    rows: list[Row] = []
    fitted: dict[str, Machine] = {}
    for place, machine in machines.items():
        name = place.partition("/")[0]
        if f"{name}/goodput/{cell.name}" not in real:
            fitted[place] = machine
            continue
        plain = predict(layouts_of(machines, args.small_chunk)[name], cell, capacity, args)
        slowdown = real[f"{name}/itl_p50_ms/{cell.name}"] / plain.itl_p50_ms
        slow = {**machines, **{each: deployed(of, slowdown=slowdown, overhead_s=0.0) for each, of in machines.items()}}
        virtual = predict(layouts_of(slow, args.small_chunk)[name], cell, capacity, args)
        overhead_s = (real[f"{name}/ttft_p50_ms/{cell.name}"] - virtual.ttft_p50_ms) / 1e3
        fitted[place] = deployed(machine, slowdown=slowdown, overhead_s=overhead_s)
        rows.append(Row(name=f"deployment/slowdown/{place}", value=slowdown, unit="x"))
        rows.append(Row(name=f"deployment/overhead/{place}", value=1e3 * overhead_s, unit="ms"))
    return fitted, rows


def deployed_step_time(real: Mapping[str, float], place: str) -> StepTimeModel:
    """The prices that a deployed worker fitted to its own steps: of several the one that they fit best.

    Raises:
        SystemExit: None did.
    """
    prefix = f"worker/error/{place}-"
    names = [name.removeprefix("worker/error/") for name in real if name.startswith(prefix)]
    if not names:
        raise SystemExit(f"--prices: the file has no step times of a worker {place}; give --machines")
    worker = min(names, key=lambda name: real[f"worker/error/{name}"])
    prices = {item.name: real[f"worker/{item.name}/{worker}"] for item in fields(StepTimeModel)}
    return StepTimeModel(**prices | {"num_steps": int(prices["num_steps"])})  # type: ignore[arg-type]


def machines_of(args: argparse.Namespace) -> dict[str, Machine]:
    """The workers of each layout: from files, or as deployed ones measured themselves.

    Raises:
        SystemExit: They are not there.
    """
    if args.machines is not None:
        try:
            one_thread, two_threads = map(load_machine, args.machines)
        except MachineFileError as error:
            raise SystemExit(f"--machines: {error}") from error
        return {place: two_threads if place.startswith(ONE) else one_thread for place in PLACES}
    prices = real_values(args.prices or args.real)
    plain = replace(CPU_CORE, shared_step_time=None, workers_per_host=1)
    return {
        place: replace(plain, name=place, step_time=model, step_noise=model.error)
        for place in PLACES
        for model in (deployed_step_time(prices, place),)
    }


def error_row(figure: str, place: str, virtual: float, real: float) -> Row:
    """One figure of one cell."""
    return Row(
        name=f"error/{figure}/{place}",
        value=100 * (virtual / real - 1),
        unit="percent",
        detail={"real": real, "virtual": virtual},
    )


def summary_rows(rows: list[Row], *, but: str) -> list[Row]:
    """Mean and worst of each figure over all cells but one."""
    out: list[Row] = []
    for figure in COMPARED:
        sizes = [
            abs(row.value) for row in rows if row.name.startswith(f"error/{figure}/") and not row.name.endswith(but)
        ]
        out.append(Row(name=f"error/{figure}/mean", value=statistics.fmean(sizes), unit="percent"))
        out.append(Row(name=f"error/{figure}/worst", value=max(sizes), unit="percent"))
    return out


def calibration_of(machine: Machine, rows: list[Row]) -> Calibration:
    """A worker, and the errors that the rows of ``summary_rows`` tell."""
    values = {row.name: row.value for row in rows}
    return Calibration(
        machine=machine,
        errors={
            figure: FigureError(mean=values[f"error/{figure}/mean"], worst=values[f"error/{figure}/worst"])
            for figure in COMPARED
        },
    )


def main() -> None:
    """Simulate what was measured, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=Path, required=True, help="the rows of a real matrix")
    parser.add_argument("--machines", type=Path, nargs=2, help="a worker of one thread, and one of two")
    parser.add_argument(
        "--prices", type=Path, help="without --machines: rows of a matrix whose workers' prices to take"
    )
    parser.add_argument("--cell-seconds", type=positive, required=True, help="as in the real run")
    parser.add_argument("--fit-cell", default="low/balanced/steady", help="fits what deploying costs")
    parser.add_argument("--small-chunk", type=count, default=SMALL_CHUNK)
    parser.add_argument("--ttft-limit-ms", type=positive, default=2000.0)
    parser.add_argument("--itl-limit-ms", type=positive, default=100.0)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the calibration to FILE")
    add_json_option(parser)
    args = parser.parse_args()
    machines = machines_of(args)
    real = real_values(args.real)
    capacity = capacity_of(real)
    layouts = layouts_of(machines, args.small_chunk)
    measured = [(name, cell) for name in layouts for cell in ALL_CELLS if f"{name}/goodput/{cell.name}" in real]
    if not measured or not capacity:
        raise SystemExit(f"--real {args.real} has no cell of a matrix with its capacity")
    fit_cell = next((cell for _, cell in measured if cell.name == args.fit_cell), measured[0][1])
    machines, deployment = fit_deployment(machines, fit_cell, real, args)
    layouts = layouts_of(machines, args.small_chunk)
    rows: list[Row] = []
    for name, cell in measured:
        values = predict(layouts[name], cell, capacity, args).values()
        rows += [
            error_row(figure, f"{name}/{cell.name}", values[figure], real[f"{name}/{figure}/{cell.name}"])
            for figure in COMPARED
        ]
    rows += [*summary_rows(rows, but=fit_cell.name), *deployment]
    if args.save is not None:
        calibration_of(machines[f"{APART}/decode"], rows).save(args.save)
    publish(rows, packages=("numpy",), json_file=args.json, title="virtual runs beside real ones")


if __name__ == "__main__":
    main()
