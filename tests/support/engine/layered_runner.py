"""A runner that stays inside a step until a test lets it end."""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.contract.executor import StepRunner
from engine.contract.step import PendingStep, SchedulerOutput

TIMEOUT_S = 120.0


class LayeredRunner:
    """A runner whose steps have as many layers as it takes: while held, a step begins one layer after another."""

    def __init__(self, inner: StepRunner, between_layers: Callable[[], None]) -> None:
        self.inner = inner
        self._between_layers = between_layers
        self._may_end = threading.Event()
        self._may_end.set()
        self._layer = threading.Condition()
        self.num_layers = 0
        self.num_steps = 0
        self.began_in: dict[str, int] = {}

    def hold(self) -> None:
        """Let the next step not end."""
        self._may_end.clear()

    def let_go(self) -> None:
        """Let steps end."""
        self._may_end.set()

    def pass_layers(self, count: int) -> None:
        """Return when so many more layers have begun."""
        with self._layer:
            target = self.num_layers + count
            assert self._layer.wait_for(lambda: self.num_layers >= target, TIMEOUT_S), "no step is held"

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Begin layers while held, then compute."""
        while output.has_work and not self._may_end.is_set():
            self._between_layers()
            with self._layer:
                self.num_layers += 1
                self._layer.notify_all()
        self.num_steps += output.has_work
        self.began_in.update((new_row.request_id, self.num_steps) for new_row in output.new_rows)
        return self.inner.launch(output)
