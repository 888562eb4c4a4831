"""Baton's worker with a small model, each of whose steps lasts as long as it would on another machine.

Scheduler, KV cache, hand-over, reports, start and drain are real. So a host of two cores has several workers that do
not take the cores from each other, as several hosts have.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.serve.workers import Worker
from engine.contract.executor import StepRunner
from engine.contract.step import ModelRunnerOutput, PendingStep, SchedulerOutput
from engine.frontend.engine_core import EngineCore
from simulation.machine import MACHINES, Machine
from simulation.step_runner import StepNoise, work_of

MACHINE_VARIABLE = "BATON_BENCHMARK_MACHINE"
"""Names the machine that workers imitate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedStep:
    """Implements ``PendingStep``: its result is available at ``end_s``, or when it is computed if that is later."""

    inner: PendingStep
    end_s: float
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def result(self) -> ModelRunnerOutput:
        """See ``PendingStep``."""
        output = self.inner.result()
        if (left_s := self.end_s - self.clock()) > 0.0:
            self.sleep(left_s)
        return output


class PacedRunner:
    """Implements ``StepRunner`` with another one, and delays its steps to those of a machine."""

    def __init__(
        self,
        inner: StepRunner,
        machine: Machine,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._inner = inner
        self._step_time = machine.step_time
        self._noise = StepNoise(machine.step_noise, skew=machine.step_skew, seed=seed)
        self._clock = clock
        self._sleep = sleep
        self._free_s = 0.0

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Compute immediately; the result is delivered later."""
        begins_s = max(self._clock(), self._free_s)
        pending = self._inner.launch(output)
        if not output.has_work:
            return pending
        self._free_s = begins_s + self._step_time.seconds(work_of(output)) * float(self._noise.next(1)[0])
        self._noise.use(1)
        return PacedStep(inner=pending, end_s=self._free_s, clock=self._clock, sleep=self._sleep)


class PacedWorker(Worker):
    """A worker with the steps of the machine that ``MACHINE_VARIABLE`` names."""

    def _build(self) -> EngineCore:
        core = super()._build()
        core.runner = PacedRunner(core.runner, MACHINES[os.environ[MACHINE_VARIABLE]], seed=os.getpid())
        return core
