"""Hold new prompts back for a multiple of the last prompt's latency, to let a batch form (O4). Free of torch."""

from __future__ import annotations

from collections.abc import Callable

from engine.core.admission_gate import Verdict
from engine.core.request import Request
from engine.core.row_table import RowTable
from engine.core.step_draft import StepDraft


class PromptDelay:
    """An admission gate. A request that was preempted is not new, and while nothing runs nothing is held back."""

    def __init__(self, delay_factor: float, *, table: RowTable, clock: Callable[[], float]) -> None:
        self._delay_factor = delay_factor
        self._table = table
        self._clock = clock
        self._prompt_step: tuple[int, float] | None = None
        self._last_prompt_latency_s = 0.0

    def ask(self, request: Request, _draft: StepDraft, /) -> Verdict:
        """BARRIER until the request has waited long enough."""
        if len(self._table) == 0 or request.num_preemptions:
            return Verdict.ADMITTED
        waited_s = self._clock() - request.queued_at_s
        is_over = waited_s >= self._delay_factor * self._last_prompt_latency_s
        return Verdict.ADMITTED if is_over else Verdict.BARRIER

    def step_scheduled(self, step_id: int, *, has_prompts: bool) -> None:
        """Start the clock of a step that computes prompts."""
        if has_prompts and self._prompt_step is None:
            self._prompt_step = (step_id, self._clock())

    def step_returned(self, step_id: int) -> None:
        """Note how long a step with prompts took."""
        if self._prompt_step is not None and self._prompt_step[0] <= step_id:
            self._last_prompt_latency_s = self._clock() - self._prompt_step[1]
            self._prompt_step = None
