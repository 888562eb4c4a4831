"""The regret matrix on this machine: every layout of two threads in every cell, each started once for all its cells."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.disagg_parts.cells import ALL_CELLS, Cell, cell_rows, cells_named, outcome_of, over_http, regret_rows
from benchmarks.disagg_parts.layouts import ELASTIC, FIXED, TWO, matrix_settings
from benchmarks.load import Timing, send_all, send_closed
from benchmarks.report import Row, kept_rows, publish
from benchmarks.served import served_cluster
from engine.contract.promise import Promise
from simulation.loads import MIXES, LoadSpec, make_load

CALIBRATED_BY = TWO
"""The layout with which the machine's capacity is measured."""

CONCURRENCY = 8
WARM_UP_REQUESTS = 6


def measure_capacity(url: str, *, seconds: float) -> dict[str, float]:
    """Requests per second of each mix that a cluster serves to 8 clients that are never idle."""
    capacity: dict[str, float] = {}
    for number, name in enumerate(MIXES):
        spec = LoadSpec(mix=name, shape="steady", rates={name: 200.0}, seconds=seconds, seed=1000 + number)
        timings = asyncio.run(send_closed(url, over_http(make_load(spec)), concurrency=CONCURRENCY, seconds=seconds))
        capacity[name] = served_per_s(timings)
    return capacity


def served_per_s(timings: Sequence[Timing]) -> float:
    """Answers per second, from the first request until the last token.

    Raises:
        SystemExit: There are too few of them to tell.
    """
    failed = [timing.error for timing in timings if timing.error is not None]
    if failed or len(timings) <= CONCURRENCY:
        raise SystemExit(
            f"calibration: {len(timings)} answers, {len(failed)} of them errors {failed[:1]}, to {CONCURRENCY} "
            "clients: give it more --calibrate-seconds"
        )
    began_s = min(timing.sent for timing in timings)
    return len(timings) / (max(timing.token_times[-1] for timing in timings) - began_s)


def worker_rows(layout: str, status: Mapping[str, Any]) -> list[Row]:
    """The work that each worker of a cluster did, and the prices that it fitted to its own steps."""
    rows: list[Row] = []
    for role, workers in status["pools"].items():
        for number, worker in enumerate(workers):
            place = f"{layout}/{role}-{number}"
            counters, prices = worker["counters"], worker["step_time"]
            rows.append(Row(name=f"worker/num_requests/{place}", value=counters["num_requests"], unit="requests"))
            rows.append(Row(name=f"worker/step_s/{place}", value=counters["step_s"], unit="s"))
            known = {name: value for name, value in prices.items() if value is not None}
            rows += [Row(name=f"worker/{name}/{place}", value=value, unit="s") for name, value in known.items()]
    return rows


PLACED = "placed_"


def placements(url: str) -> dict[str, float]:
    """How many requests a cluster with elastic roles placed, by reason."""
    totals = httpx.get(f"{url}/status", timeout=30, trust_env=False).json()["totals"]
    return {name.removeprefix(PLACED): float(value) for name, value in totals.items() if name.startswith(PLACED)}


def placed_rows(layout: str, cell: str, before: Mapping[str, float], after: Mapping[str, float]) -> list[Row]:
    """Rows ``<layout>/placed_<reason>/<cell>``, for the reasons that occurred in a cell."""
    counts = {reason: number - before.get(reason, 0.0) for reason, number in after.items()}
    return [
        Row(name=f"{layout}/{PLACED}{reason}/{cell}", value=count, unit="requests")
        for reason, count in counts.items()
        if count > 0
    ]


def parse_capacity(entries: Sequence[str]) -> dict[str, float]:
    """Parse ``mix=requests/s`` for every mix.

    Raises:
        SystemExit: One is missing, or no number above 0.
    """
    capacity: dict[str, float] = {}
    for entry in entries:
        name, _, number = entry.partition("=")
        try:
            capacity[name] = float(number)
        except ValueError:
            raise SystemExit(f"--capacity {entry}: {number!r} is not a number") from None
    if entries and (capacity.keys() != MIXES.keys() or min(capacity.values()) <= 0.0):
        raise SystemExit(f"--capacity {' '.join(entries)}: name each of {', '.join(MIXES)} once, with a rate above 0")
    return capacity


def run_layout(
    name: str, model: Path, cells: Sequence[Cell], capacity: Mapping[str, float], args: argparse.Namespace
) -> tuple[list[Row], Mapping[str, float]]:
    """Measure one layout in all its cells. If no capacity is known and this layout measures it, calibrate first."""
    rows: list[Row] = []
    promise = Promise(ttft_ms=args.ttft_limit_ms, itl_ms=args.itl_limit_ms)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump({"model": str(model), "max_model_len": args.max_model_len, **matrix_settings(name, args)}, file)
        file.flush()
        with served_cluster(["--config", file.name]) as url:
            warm_up = make_load(LoadSpec(mix="balanced", shape="steady", rates={"balanced": 4.0}, seconds=60.0))
            asyncio.run(send_all(url, over_http(warm_up[:WARM_UP_REQUESTS])))
            if not capacity:
                capacity = measure_capacity(url, seconds=args.calibrate_seconds)
                print("capacity:", *(f"{mix}={rate:.3f}" for mix, rate in capacity.items()), flush=True)
            for cell in cells:
                began_s, before = time.perf_counter(), placements(url)
                arrivals = over_http(cell.load(capacity, seconds=args.cell_seconds))
                outcomes = [outcome_of(timing) for timing in asyncio.run(send_all(url, arrivals))]
                rows.extend(cell_rows(name, cell.name, outcomes, promise))
                rows.extend(placed_rows(name, cell.name, before, placements(url)))
                took_s = time.perf_counter() - began_s
                print(f"{name} {cell.name}: {len(outcomes)} requests in {took_s:.1f} s", flush=True)
            rows.extend(worker_rows(name, httpx.get(f"{url}/status", timeout=30, trust_env=False).json()))
    return rows, capacity


def is_placed(row: str, layouts: Sequence[str], cells: Sequence[str]) -> bool:
    """True for a row of ``placed_rows`` of these cells. Such rows of an earlier run are dropped, since a new run has
    none for reasons that did not occur.
    """
    layout, _, rest = row.partition("/")
    reason, _, cell = rest.partition("/")
    return layout in layouts and reason.startswith(PLACED) and cell in cells


def run_matrix(model: Path, args: argparse.Namespace) -> None:
    """Measure the requested layouts and cells, merge them with the kept rows of an earlier run, and publish."""
    cells = cells_named(args.cells)
    kept = kept_rows(args.json) if args.merge else []
    capacity = parse_capacity(args.capacity) or {
        str(row["name"]).removeprefix("capacity/"): float(row["value"])
        for row in kept
        if str(row["name"]).startswith("capacity/")
    }
    layouts = list(args.layouts)
    if not capacity:
        if CALIBRATED_BY not in layouts:
            raise SystemExit(
                f"nothing says what the machine can serve: add {CALIBRATED_BY} to --layouts, which measures it, give "
                "--capacity, or --merge with a file that has it"
            )
        layouts.sort(key=lambda name: name != CALIBRATED_BY)
    rows: list[Row] = []
    for name in layouts:
        of_layout, capacity = run_layout(name, model, cells, capacity, args)
        rows.extend(of_layout)
    rows.extend(Row(name=f"capacity/{mix}", value=rate, unit="requests/s") for mix, rate in capacity.items())
    kept = [row for row in kept if not is_placed(str(row["name"]), layouts, [cell.name for cell in cells])]
    values = {str(row["name"]): float(row["value"]) for row in kept} | {row.name: row.value for row in rows}
    names = [cell.name for cell in ALL_CELLS]
    rows.extend(regret_rows(values, layout=ELASTIC, others=FIXED, cells=names))
    publish(rows, packages=("torch", "ray", "nixl"), json_file=args.json, title="layouts of two threads", kept=kept)
