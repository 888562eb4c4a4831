"""Preemption without need, as a switch for tests (O6). Free of torch."""

from __future__ import annotations

import random

from engine.config import SchedulerConfig
from engine.core.preemption import PreemptionPolicy
from engine.core.request_book import RequestBook
from engine.core.row_table import RowTable
from engine.core.step_draft import StepDraft


class ArtificialPreemption:
    """Preempts the last running request with a probability per step, at most so many times. Seeded: runs repeat."""

    def __init__(
        self, config: SchedulerConfig, *, table: RowTable, book: RequestBook, preemption: PreemptionPolicy
    ) -> None:
        self._probability = config.artificial_preemption_probability
        self._num_left = config.max_num_artificial_preemptions
        self._table = table
        self._book = book
        self._preemption = preemption
        self._random = random.Random(0)

    def prepare(self, draft: StepDraft) -> None:
        """Perhaps preempt, before the step is put together."""
        if not self._num_left or self._random.random() >= self._probability:
            return
        victim = self._preemption.last(self._table.running())
        if victim is not None:
            self._num_left -= 1
            self._book.preempt(victim)
            draft.is_blocked = draft.has_preempted = True
