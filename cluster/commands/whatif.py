"""`baton whatif`: how layouts would serve a load, without a cluster."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster.commands.clients.status import print_table
from cluster.commands.signals import ending_event_loops
from engine.contract.promise import Promise
from simulation.layout import Layout, LayoutError
from simulation.loads import LoadError
from simulation.machine import MachineFileError
from simulation.outcome import Figures, figures
from simulation.whatif.answer import Judge, Question, Verdict, judging
from simulation.whatif.calibration import FIGURES, Calibration, find_calibration
from simulation.whatif.cheapest import search_cheapest
from simulation.whatif.layouts import MAX_WORKERS, layouts_of_size, parse_layouts
from simulation.whatif.parts import Part
from simulation.whatif.plots import PlotsUnavailableError, check_plots, draw
from simulation.whatif.recorded import RecordedRequest, RecordedSource
from simulation.whatif.source import DescribedSource, Source, TraceSource

DEFAULT_SECONDS = 60.0

RECORDED = "recorded"
"""The name of the row with what recorded requests really got."""


class WhatIfError(ValueError):
    """The question cannot be answered as it was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfOptions:
    """The flags of the command, unchecked; None where a flag was not given."""

    trace: Path | None
    recorded: Sequence[RecordedRequest] | None
    start_s: float
    seconds: float | None
    speed: float
    scale: int
    mix: str | None
    shape: str
    rate: float | None
    layouts: str | None
    is_search: bool
    max_workers: int
    attainment: float
    ttft_ms: float | None
    itl_ms: float | None
    price: float
    calibration: str | Calibration
    seed: int
    processes: int
    json_file: Path | None
    plots: Path | None

    @property
    def promise(self) -> Promise:
        """What requests should get."""
        return Promise(ttft_ms=self.ttft_ms, itl_ms=self.itl_ms)

    def source(self) -> Source:
        """The requested load.

        Raises:
            WhatIfError: The flags name two loads, or none.
        """
        if self.trace is not None and self.recorded is not None:
            raise WhatIfError("--trace and --recorded cannot be combined: give one of them")
        if self.trace is not None or self.recorded is not None:
            if self.mix is not None or self.rate is not None:
                name = "--recorded" if self.trace is None else "--trace"
                raise WhatIfError(f"{name} cannot be combined with --mix and --rate: leave these out")
            return self._recorded_source(math.inf if self.seconds is None else self.seconds)
        if self.mix is None or self.rate is None:
            raise WhatIfError("no load is given: use --trace FILE, --recorded URL, or --mix and --rate")
        if (self.start_s, self.speed, self.scale) != (0.0, 1.0, 1):
            raise WhatIfError("--start-s, --speed and --scale need --trace or --recorded: leave them out")
        seconds = DEFAULT_SECONDS if self.seconds is None else self.seconds
        return DescribedSource(mix=self.mix, shape=self.shape, rate=self.rate, seconds=seconds, seed=self.seed)

    def _recorded_source(self, seconds: float) -> Source:
        if self.trace is not None:
            return TraceSource(
                file=self.trace, start_s=self.start_s, seconds=seconds, speed=self.speed, scale=self.scale
            )
        assert self.recorded is not None
        part = Part(start_s=self.start_s, seconds=seconds, speed=self.speed, scale=self.scale)
        return RecordedSource(requests=tuple(self.recorded), part=part)

    def found_calibration(self) -> Calibration:
        """The calibration of workers: as a cluster reports it, by its name, or from a file.

        Raises:
            MachineFileError: There is none; the message says what is wrong.
        """
        return self.calibration if isinstance(self.calibration, Calibration) else find_calibration(self.calibration)

    def check(self) -> None:
        """Check the flags.

        Raises:
            WhatIfError: A flag is wrong.
        """
        if self.is_search and self.layouts is not None:
            raise WhatIfError(f"--search and --layouts {self.layouts} cannot be combined: give one of them")
        if not self.is_search and self.layouts is None:
            raise WhatIfError(
                "no layouts are given: use --layouts LIST, or --search for the cheapest that keeps the promise"
            )
        if self.is_search and self.promise == Promise():
            raise WhatIfError("--search needs a promise to keep: set --ttft-ms, --itl-ms or both")
        if not 0.0 < self.attainment <= 1.0:
            raise WhatIfError(f"--attainment must be above 0 and at most 1, got {self.attainment}")
        if not 1 <= self.max_workers <= MAX_WORKERS:
            raise WhatIfError(f"--max-workers must be from 1 to {MAX_WORKERS}, got {self.max_workers}")
        for flag, value in (("--ttft-ms", self.ttft_ms), ("--itl-ms", self.itl_ms), ("--seconds", self.seconds)):
            if value is not None and not 0.0 < value < math.inf:
                raise WhatIfError(f"{flag} must be above 0, got {value}")
        if not 0.0 <= self.price < math.inf:
            raise WhatIfError(f"--price must be 0 or more, got {self.price}")
        self._check_json_file()

    def _check_json_file(self) -> None:
        if self.json_file is not None and not self.json_file.parent.is_dir():
            raise WhatIfError(f"--json-file {self.json_file}: there is no folder {self.json_file.parent}")
        if self.json_file is not None and self.json_file.is_dir():
            raise WhatIfError(f"--json-file {self.json_file} is a folder: name a file")


def whatif(options: WhatIfOptions, output: Console, progress: Console) -> bool:
    """Answer the question: a table, and the files that were asked for. False if a search found nothing.

    Raises:
        WhatIfError: The question is wrong; the message says why.
    """
    try:
        options.check()
        if options.plots is not None:
            check_plots(options.plots)
        calibration = options.found_calibration()
        source = options.source()
        listed: Sequence[Layout] = ()
        if options.layouts is not None:
            listed = parse_layouts(options.layouts, calibration.machine, options.promise)
        question = Question(source=source, promise=options.promise, price_per_hour=options.price, seed=options.seed)
        with ending_event_loops(), judging(question, calibration.machine, num_processes=options.processes) as judge:
            tried, best = _answer(options, calibration, listed, judge, progress)
    except (LoadError, LayoutError, MachineFileError, PlotsUnavailableError) as error:
        raise WhatIfError(str(error)) from error
    recorded = source.outcomes() if isinstance(source, RecordedSource) else ()
    real = figures(recorded, options.promise) if recorded else None
    print_table(table_of(tried, best, real), output)
    for line in notes(options, calibration, tried, best, real):
        output.print(line, markup=False, highlight=False, soft_wrap=True)
    try:
        if options.json_file is not None:
            options.json_file.write_text(json.dumps(report(options, calibration, tried, best, real), indent=1) + "\n")
        if options.plots is not None:
            shown = tried if best is None else [best]
            for file in draw(shown, options.plots):
                output.print(f"drawn: {file}", markup=False, highlight=False, soft_wrap=True)
    except OSError as error:
        raise WhatIfError(f"{error.filename or options.json_file} cannot be written: {error.strerror}") from error
    return not options.is_search or best is not None


def _answer(
    options: WhatIfOptions, calibration: Calibration, listed: Sequence[Layout], judge: Judge, console: Console
) -> tuple[Sequence[Verdict], Verdict | None]:
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=None)

        def telling(layouts: Sequence[Layout]) -> list[Verdict]:
            progress.update(task, description=f"simulating {', '.join(layout.name for layout in layouts)}")
            return judge(layouts)

        if not options.is_search:
            return telling(listed), None
        found = search_cheapest(
            telling,
            lambda num_workers: layouts_of_size(num_workers, calibration.machine, options.promise),
            attainment=options.attainment,
            max_workers=options.max_workers,
        )
        return found.tried, found.best


def table_of(tried: Sequence[Verdict], best: Verdict | None, real: Figures | None = None) -> Table:
    """A table with a row per layout, after a row of ``real`` figures, if there are any. ``best`` is marked."""
    table = Table(box=None, pad_edge=False)
    table.add_column("layout", no_wrap=True)
    names = ("kept %", "good/s", "TTFT50", "90 ms", "gap50", "99 ms", "busy %", "hours", "cost")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    if real is not None:
        table.add_row(RECORDED, *_cells(real), "-", "-")
    for verdict in tried:
        name = f"{verdict.layout}{' *' if verdict is best else ''}"
        table.add_row(name, *_cells(verdict.figures), f"{verdict.worker_hours:.3f}", f"{verdict.cost:.3f}")
    return table


def _cells(found: Figures) -> Sequence[str]:
    times = (found.ttft_p50_ms, found.ttft_p90_ms, found.itl_p50_ms, found.itl_p99_ms, found.utilisation)
    return (f"{found.share_good:.1f}", f"{found.goodput:.2f}", *map(_number, times))


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def notes(
    options: WhatIfOptions,
    calibration: Calibration,
    tried: Sequence[Verdict],
    best: Verdict | None,
    real: Figures | None,
) -> list[str]:
    """Notes on the table: the load, the result of the search, failed requests, and the size of possible errors."""
    num_requests = tried[0].figures.num_requests
    requests = f"{num_requests} request{'' if num_requests == 1 else 's'}"
    lines = [f"{requests}; workers: {calibration.origin or calibration.machine.name}"]
    if real is not None:
        lines.append(f"{RECORDED}: latencies of {real.num_requests} of them, as their routers measured them")
    if options.is_search:
        kept = f"{100 * options.attainment:g} % of the requests"
        if best is not None:
            lines.append(f"cheapest that keeps the promise for {kept}: {best.layout} (*)")
        else:
            lines.append(f"no layout of up to {options.max_workers} workers keeps the promise for {kept}")
    failed = [verdict for verdict in tried if verdict.figures.num_failed]
    lines += [f"{verdict.layout}: {verdict.figures.num_failed} requests failed" for verdict in failed]
    if not calibration.errors:
        return [*lines, "error: unknown, because no predictions of this calibration were compared with real runs"]
    parts = [
        f"{name.removesuffix('_ms').replace('_', ' ')} {error.mean:.0f} % ({error.worst:.0f} %)"
        for name in FIGURES
        if (error := calibration.errors.get(name)) is not None
    ]
    return [*lines, f"error in the last calibration, mean (worst): {', '.join(parts)}"]


def report(
    options: WhatIfOptions,
    calibration: Calibration,
    tried: Sequence[Verdict],
    best: Verdict | None,
    real: Figures | None,
) -> Mapping[str, Any]:
    """The answer as JSON: promise, calibration with its errors, what was recorded, and a row for each layout."""
    return {
        "promise": asdict(options.promise),
        "price_per_hour": options.price,
        "calibration": {
            "machine": calibration.machine.name,
            "origin": calibration.origin or None,
            "errors_percent": {name: asdict(error) for name, error in calibration.errors.items()},
        },
        "best": None if best is None else best.layout,
        RECORDED: None if real is None else _values(real),
        "layouts": [_row(verdict) for verdict in tried],
    }


def _row(verdict: Verdict) -> Mapping[str, Any]:
    return {
        "layout": verdict.layout,
        "workers": verdict.num_workers,
        "attainment": verdict.attainment,
        "worker_hours": verdict.worker_hours,
        "cost": verdict.cost,
        **_values(verdict.figures),
    }


def _values(found: Figures) -> Mapping[str, Any]:
    values = found.values()
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}
