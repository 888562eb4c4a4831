"""A world whose requests have promises, around a scheduler with given step times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from engine.contract.config import SchedulerConfig
from engine.contract.messages import GenerateRequest
from engine.contract.promise import NO_PROMISE, Promise
from engine.contract.step_time import UNKNOWN_STEP_TIME, StepTimeModel
from tests.support.scheduler.fixed_step_time import know_step_times
from tests.support.scheduler.scheduler_world import SchedulerWorld

STEP_TIMES: Final = (
    UNKNOWN_STEP_TIME,
    StepTimeModel(base_s=0.01, row_s=0.001, prompt_token_s=0.002, error=0.0, num_steps=1),
    StepTimeModel(base_s=0.001, row_s=0.001, prompt_token_s=0.004, prompt_read_s=1e-4, error=0.5, num_steps=1),
)
PROMISES: Final = (
    NO_PROMISE,
    Promise(itl_ms=20.0),
    Promise(ttft_ms=100.0, itl_ms=30.0),
    Promise(ttft_ms=2000.0),
    Promise(itl_ms=1.0),
)


class PromisingWorld(SchedulerWorld):
    """The size of the pool determines the assumed step times; each request has another promise than the last one."""

    def __init__(self, config: SchedulerConfig, *, num_blocks: int, **options: Any) -> None:
        super().__init__(config, num_blocks=num_blocks, **options)
        know_step_times(self.scheduler, STEP_TIMES[num_blocks % len(STEP_TIMES)])
        self._num_added = 0

    def add(self, request: GenerateRequest) -> None:
        """Add a request; refusals are raised."""
        self._num_added += 1
        super().add(replace(request, promise=PROMISES[self._num_added % len(PROMISES)]))

    def let_happen(self, event: str) -> None:
        """Trigger one of ``RARE_EVENTS``."""
        if event == "drain":
            self.move_out()
        elif "leave" in event:
            self.order_out(self.live_ids()[::2], only_waiting=event == "who waits leaves")
        elif event == "front end goes":
            self.scheduler.forget_client("client-0")
        else:
            was_reset = self.scheduler.reset_prefix_cache(preempt_running=event == "reset")
            assert was_reset or event != "reset"
