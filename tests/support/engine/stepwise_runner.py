"""A runner that makes only as many steps as the test allows."""

from __future__ import annotations

import threading

from engine.contract.executor import StepRunner
from engine.contract.step import PendingStep, SchedulerOutput

TIMEOUT_S = 120.0


class StepwiseRunner:
    """Wraps a runner that computes only as many steps as ``allow`` or ``pace`` let through, or all after ``open``.

    ``is_waiting`` while a step that was not allowed yet has begun.
    """

    def __init__(self, inner: StepRunner) -> None:
        self._inner = inner
        self._steps = threading.Semaphore(0)
        self._is_open = False
        self.is_waiting = False

    def allow(self, num_steps: int) -> None:
        """Allow this many more steps."""
        self._steps.release(num_steps)

    def pace(self, num_steps: int) -> None:
        """Allow this many steps and no more; only to be called between requests."""
        self._steps = threading.Semaphore(num_steps)
        self._is_open = False

    def open(self) -> None:
        """Allow all steps from now on."""
        self._is_open = True
        self._steps.release()

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Wait for permission, then run."""
        if output.has_work and not self._is_open:
            self.is_waiting = not self._steps.acquire(blocking=False)
            if self.is_waiting:
                assert self._steps.acquire(timeout=TIMEOUT_S), "nobody let the step go"
            self.is_waiting = False
        return self._inner.launch(output)
