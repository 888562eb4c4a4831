"""Predictions for the requests of a real run."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.whatif_parts.cases import CASES, Measured
from simulation.cluster import simulate
from simulation.machine import Machine
from simulation.outcome import Outcome
from simulation.whatif.layouts import parse_layout
from simulation.whatif.source import warm_up_of


def predicted(run: Measured, machine: Machine) -> Sequence[Outcome]:
    """Simulate the same requests at the same times with these workers, which have served such requests before."""
    arrivals = CASES[run.case].load(run.seconds)
    layout = parse_layout(run.layout, machine, run.promise)
    return simulate(layout, arrivals, warm_up=warm_up_of(arrivals)).outcomes
