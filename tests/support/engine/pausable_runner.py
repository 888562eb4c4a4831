"""A runner that waits inside a step until the test lets it continue."""

from __future__ import annotations

import threading

from engine.contract.executor import StepRunner
from engine.contract.step import PendingStep, SchedulerOutput

TIMEOUT_S = 120.0


class PausableRunner:
    """Wraps a runner: ``hold`` before a step, ``wait_entered`` until it is inside one, ``let_go`` to continue."""

    def __init__(self, inner: StepRunner) -> None:
        self._inner = inner
        self._entered = threading.Event()
        self._may_run = threading.Event()
        self._may_run.set()

    def hold(self) -> None:
        """Stop inside the next step."""
        self._entered.clear()
        self._may_run.clear()

    def wait_entered(self) -> None:
        """Return once a step is inside."""
        assert self._entered.wait(TIMEOUT_S), "no step began"

    def let_go(self) -> None:
        """Let steps run."""
        self._may_run.set()

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Wait if held, then run."""
        self._entered.set()
        assert self._may_run.wait(TIMEOUT_S), "nobody let the step go"
        return self._inner.launch(output)
