"""The cells of the regret matrix: amount, mix and shape of the load; and the figures of a layout in a cell."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from benchmarks.load import Arrival, Timing
from benchmarks.report import Row
from engine.contract.promise import Promise
from simulation.loads import MIXES, SHAPES, LoadSpec, Shape, make_load
from simulation.loads import Arrival as VirtualArrival
from simulation.outcome import Figures, Outcome, figures

LEVELS: Mapping[str, float] = {"low": 0.35, "mid": 0.7, "saturated": 1.1}
"""Requests per second, as a share of what two workers serve that are always busy."""

ENOUGH = 0.95
"""Gaps are only compared with layouts that reach this share of the best goodput."""

UNITS = {"goodput": "requests/s", "share_good": "percent", "tokens_per_s": "tokens/s", "utilisation": "percent"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One load. ``part`` is its number. No two parts share a prompt, because a prefix cache would find it."""

    level: str
    mix: str
    shape: Shape
    part: int

    @property
    def name(self) -> str:
        """The cell's part of the names of rows."""
        return f"{self.level}/{self.mix}/{self.shape}"

    def load(self, capacity: Mapping[str, float], *, seconds: float, scale: float = 1.0) -> list[VirtualArrival]:
        """The requests of the cell; ``capacity`` is the number of requests per second that can be served, by mix, and
        ``scale`` multiplies it.
        """
        share = LEVELS[self.level] * scale
        rates = {name: share * rate for name, rate in capacity.items()}
        return make_load(LoadSpec(mix=self.mix, shape=self.shape, rates=rates, seconds=seconds, seed=self.part))


ALL_CELLS = tuple(
    Cell(level=level, mix=mix, shape=shape, part=part)
    for part, (level, mix, shape) in enumerate(itertools.product(LEVELS, MIXES, SHAPES), start=1)
)


def cells_named(patterns: Sequence[str]) -> list[Cell]:
    """The cells whose names match one of some patterns (``low/*/steady``), in order.

    Raises:
        SystemExit: A pattern fits none.
    """
    for pattern in patterns:
        if not any(fnmatch(cell.name, pattern) for cell in ALL_CELLS):
            names = f"{'|'.join(LEVELS)}/{'|'.join(MIXES)}/{'|'.join(SHAPES)}"
            raise SystemExit(f"--cells {pattern} matches no cell; cells: {names}; * matches any")
    return [cell for cell in ALL_CELLS if any(fnmatch(cell.name, pattern) for pattern in patterns)]


def over_http(arrivals: Sequence[VirtualArrival]) -> list[Arrival]:
    """Convert the requests for sending them to a server."""
    return [
        Arrival(
            at_s=arrival.at_s,
            kind=arrival.kind,
            prompt=arrival.prompt.tolist(),
            num_output_tokens=arrival.num_output_tokens,
        )
        for arrival in arrivals
    ]


def outcome_of(timing: Timing) -> Outcome:
    """Convert a client's measurements to the outcome type of the virtual cluster."""
    return Outcome(
        sent_s=timing.sent,
        kind=timing.kind,
        token_times_s=timing.token_times,
        num_tokens=timing.num_tokens,
        error=timing.error,
    )


def cell_rows(layout: str, cell: str, outcomes: Sequence[Outcome], promise: Promise) -> list[Row]:
    """The figures of a layout in a cell."""
    return figure_rows(layout, cell, figures(outcomes, promise))


def figure_rows(layout: str, cell: str, of_cell: Figures) -> list[Row]:
    """``<layout>/<figure>/<cell>``."""
    return [
        Row(
            name=f"{layout}/{name}/{cell}",
            value=value,
            unit=UNITS.get(name, "ms" if name.endswith("_ms") else "requests"),
        )
        for name, value in of_cell.values().items()
        if value == value  # not those that nobody measured
    ]


def regret_rows(values: Mapping[str, float], *, layout: str, others: Sequence[str], cells: Sequence[str]) -> list[Row]:
    """Compare a layout with the best of the others, in every cell in which both were measured.

    ``regret/goodput/<cell>`` is its goodput over the best one's; ``regret/itl_p99/<cell>`` its p99 gap over the least
    of those that reach ``ENOUGH`` of the best goodput.
    """
    rows: list[Row] = []
    for cell in cells:
        goodput = {name: values[key] for name in others if (key := f"{name}/goodput/{cell}") in values}
        own = values.get(f"{layout}/goodput/{cell}")
        if own is None or not goodput:
            continue
        best = max(goodput, key=goodput.__getitem__)
        if goodput[best] > 0.0:
            detail: dict[str, float | str] = {"best": best, "best_goodput": goodput[best]}
            rows.append(Row(name=f"regret/goodput/{cell}", value=own / goodput[best], unit="x", detail=detail))
        gaps = {
            name: values[f"{name}/itl_p99_ms/{cell}"] for name in goodput if goodput[name] >= ENOUGH * goodput[best]
        }
        calmest = min(gaps, key=gaps.__getitem__)
        own_gap = values[f"{layout}/itl_p99_ms/{cell}"]
        rows.append(
            Row(name=f"regret/itl_p99/{cell}", value=own_gap / gaps[calmest], unit="x", detail={"calmest": calmest})
        )
    return rows
