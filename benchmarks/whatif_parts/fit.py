from __future__ import annotations
from collections.abc import Sequence
from benchmarks.whatif_parts.cases import Measured
from simulation.machine import Machine
def fit_machine(machine: Machine, runs: Sequence[Measured]) -> Machine:
    return machine
