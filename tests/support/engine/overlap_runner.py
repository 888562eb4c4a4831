"""A runner that counts overlapping steps."""

from __future__ import annotations

from engine.contract.executor import StepRunner
from engine.contract.step import ModelRunnerOutput, PendingStep, SchedulerOutput


class OverlapRunner:
    """Wraps a runner; ``num_overlaps`` counts steps that were launched before the result of the last one was taken."""

    def __init__(self, inner: StepRunner) -> None:
        self._inner = inner
        self._num_open = 0
        self.num_overlaps = 0

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Count, and launch."""
        self.num_overlaps += self._num_open > 0
        self._num_open += 1
        return _Watched(self._inner.launch(output), self)

    def close_one(self) -> None:
        """Note that a result was taken."""
        self._num_open -= 1


class _Watched:
    """Implements ``PendingStep``."""

    def __init__(self, inner: PendingStep, runner: OverlapRunner) -> None:
        self._inner = inner
        self._runner = runner

    def result(self) -> ModelRunnerOutput:
        """Take the result, and note that."""
        self._runner.close_one()
        return self._inner.result()
