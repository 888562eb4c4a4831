"""How much the answers of ``baton whatif`` differ from real runs on this machine: six loads that nothing was fitted to.

    python -m benchmarks.whatif_check --measure fitted.jsonl --loads 'fit/*' --seconds 25
    python -m benchmarks.whatif_check --measure checked.jsonl --loads 'low/*' 'mid/*' 'high/*' --seconds 40
    python -m benchmarks.whatif_check --fit fitted.jsonl --save calibration.json
    python -m benchmarks.whatif_check --compare checked.jsonl --calibration calibration.json --json rows.json
    python -m benchmarks.whatif_check --compare checked.jsonl --calibration reported --json rows.json

The layouts have two threads in all: ``apart:1+1`` and ``unified:2``, of a random Llama of 125 M parameters. ``--fit``
fits a machine to the runs of three loads, ``--compare`` simulates the requests of others at their times, by a
calibration or by what each run's workers reported of themselves when it had ended. A row
``<figure>/<layout>/<load>`` is the error in percent, with what was ``predicted`` and ``measured``; ``.../mean`` and
``.../worst`` are of all of them, by their size. ``--save`` with ``--compare`` writes the calibration with its errors.
With ``--again FILE``, other runs of the same loads, ``again/<figure>/mean`` and ``.../worst`` tell how far two real
runs are from each other.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import torch

from benchmarks.arguments import positive
from benchmarks.random_llama import write_random_llama
from benchmarks.report import Row, add_json_option, publish
from benchmarks.whatif_parts.cases import CASES, LAYOUTS, Case, Measured, read, save
from benchmarks.whatif_parts.fit import fit_machine
from benchmarks.whatif_parts.predict import predicted
from benchmarks.whatif_parts.real import measure
from engine.contract.promise import Promise
from simulation.machine import CPU_HOST, Machine, MachineFileError
from simulation.outcome import figures
from simulation.whatif.calibration import FIGURES, Calibration, FigureError, find_calibration

REPORTED = "reported"
"""The value of ``--calibration`` for what each run's workers reported of themselves."""


def cases_named(patterns: Sequence[str]) -> list[Case]:
    """The cases whose names match one of some patterns.

    Raises:
        SystemExit: None does.
    """
    found = [case for name, case in CASES.items() if any(fnmatch(name, pattern) for pattern in patterns)]
    if not found:
        raise SystemExit(f"--loads {' '.join(patterns)} matches none of {', '.join(CASES)}")
    return found


def error_rows(runs: Sequence[Measured], machine: Machine | None, promise: Promise) -> list[Row]:
    """Each figure of each run, measured and predicted for the same requests; then mean and worst errors. Without a
    machine, the calibration of each run is used.

    Raises:
        SystemExit: A run has none.
    """
    rows: list[Row] = []
    for run in runs:
        own = machine or run.reported
        if own is None:
            raise SystemExit(f"{run.layout}, {run.case}: the results have no report of the workers; measure them again")
        real = figures(run.outcomes, promise).values()
        virtual = figures(predicted(run, own), promise).values()
        for figure in FIGURES:
            error = 100 * (virtual[figure] / real[figure] - 1) if real[figure] else float("nan")
            detail: dict[str, float | str] = {"predicted": virtual[figure], "measured": real[figure], "error": error}
            rows.append(Row(name=f"{figure}/{run.layout}/{run.case}", value=error, unit="percent", detail=detail))
    for figure in FIGURES:
        sizes = [abs(row.value) for row in rows if row.name.startswith(f"{figure}/")]
        rows.append(Row(name=f"{figure}/mean", value=statistics.fmean(sizes), unit="percent"))
        rows.append(Row(name=f"{figure}/worst", value=max(sizes), unit="percent"))
    return rows


def again_rows(runs: Sequence[Measured], again: Sequence[Measured], promise: Promise) -> list[Row]:
    """How far the figures of other runs of the same loads are from those of the first ones, in percent.

    Raises:
        SystemExit: They are not of the same loads.
    """
    others = {(run.layout, run.case, run.seconds): run for run in again}
    rows: list[Row] = []
    for figure in FIGURES:
        sizes: list[float] = []
        for run in runs:
            if (run.layout, run.case, run.seconds) not in others:
                raise SystemExit(f"--again: no run of {run.layout}, {run.case} for {run.seconds:g} s")
            other = others[run.layout, run.case, run.seconds]
            first, second = (figures(item.outcomes, promise).values()[figure] for item in (run, other))
            sizes.append(abs(100 * (second / first - 1)) if first else float("nan"))
        rows.append(Row(name=f"again/{figure}/mean", value=statistics.fmean(sizes), unit="percent"))
        rows.append(Row(name=f"again/{figure}/worst", value=max(sizes), unit="percent"))
    return rows


def calibration_of(machine: Machine, rows: Sequence[Row]) -> Calibration:
    """The machine with the errors that the rows contain."""
    values = {row.name: row.value for row in rows}
    errors = {figure: FigureError(mean=values[f"{figure}/mean"], worst=values[f"{figure}/worst"]) for figure in FIGURES}
    return Calibration(machine=machine, errors=errors)


def measure_all(file: Path, args: argparse.Namespace) -> None:
    """Measure the requested loads on all layouts, and store every request's times."""
    runs: list[Measured] = []
    with tempfile.TemporaryDirectory() as directory:
        write_random_llama(Path(directory), torch.bfloat16)
        for layout in args.layouts:
            cases = cases_named(args.loads)
            for run in measure(layout, cases, Path(directory), seconds=args.seconds):
                runs.append(run)
                save(runs, file)


def main() -> None:
    """Measure, fit or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, metavar="FILE", help="run real clusters, and write the results to FILE")
    parser.add_argument("--fit", type=Path, nargs="+", metavar="FILE", help="fit a machine to the results in FILE")
    parser.add_argument(
        "--compare", type=Path, nargs="+", metavar="FILE", help="compare predictions with the results in FILE"
    )
    parser.add_argument("--again", type=Path, nargs="+", metavar="FILE", help="with --compare: runs of the same loads")
    parser.add_argument("--loads", nargs="+", default=["*"], metavar="PATTERN", help="with --measure")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS, help="with --measure")
    parser.add_argument("--seconds", type=positive, default=30.0, help="with --measure: seconds of each load")
    parser.add_argument(
        "--calibration",
        default=CPU_HOST.name,
        help="with --fit or --compare: calibration as for `baton whatif`; with --compare also 'reported'",
    )
    parser.add_argument("--ttft-limit-ms", type=positive, default=2000.0)
    parser.add_argument("--itl-limit-ms", type=positive, default=100.0)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the calibration to FILE")
    add_json_option(parser)
    args = parser.parse_args()
    if sum(bool(part) for part in (args.measure, args.fit, args.compare)) != 1:
        parser.error("give exactly one of --measure, --fit and --compare")
    if args.calibration == REPORTED and (args.fit or args.save is not None):
        parser.error(
            f"--calibration {REPORTED} needs --compare without --save, because each run has a calibration of its own"
        )
    if args.measure is not None:
        measure_all(args.measure, args)
        return
    try:
        machine = None if args.calibration == REPORTED else find_calibration(args.calibration).machine
    except MachineFileError as error:
        raise SystemExit(f"--calibration: {error}") from error
    promise = Promise(ttft_ms=args.ttft_limit_ms, itl_ms=args.itl_limit_ms)
    runs = read(args.fit or args.compare)
    if machine is not None and args.fit:
        machine = fit_machine(machine, runs)
    rows = error_rows(runs, machine, promise)
    if args.again is not None:
        rows += again_rows(runs, read(args.again), promise)
    if machine is not None and args.save is not None:
        (Calibration(machine=machine) if args.fit else calibration_of(machine, rows)).save(args.save)
    publish(rows, packages=("numpy",), json_file=args.json, title="predictions beside real runs")


if __name__ == "__main__":
    main()
