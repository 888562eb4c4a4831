"""Records when the steps and loads of one traced request were, up to its first token. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.contract.tracing.request_timings import MAX_LOADS, MAX_STEPS, LoadTiming, RequestTimings, StepTiming


class Timeline:
    """The record of a request that came at ``arrived_s`` by ``clock``. It holds a bounded number of entries."""

    __slots__ = ("_arrived_s", "_clock", "_loads", "_steps")

    def __init__(self, *, arrived_s: float, clock: Callable[[], float]) -> None:
        self._arrived_s = arrived_s
        self._clock = clock
        self._steps: list[StepTiming] = []
        self._loads: list[LoadTiming] = []

    def note_step(self, *, start_s: float, end_s: float, num_tokens: int) -> None:
        """Record a finished step that computed some of the request's tokens."""
        start_s = max(start_s - self._arrived_s, 0.0)
        duration_s = end_s - self._arrived_s - start_s
        if len(self._steps) < MAX_STEPS:
            self._steps.append(StepTiming(start_s=start_s, duration_s=duration_s, num_tokens=num_tokens))
            return
        last = self._steps[-1]
        self._steps[-1] = replace(
            last,
            duration_s=start_s + duration_s - last.start_s,
            num_tokens=last.num_tokens + num_tokens,
            num_steps=last.num_steps + 1,
        )

    def note_load(
        self, *, duration_s: float, num_bytes: int, num_blocks: int, num_failed_blocks: int, source: str
    ) -> None:
        """Record a load that ended, successfully or not, after ``duration_s``."""
        if len(self._loads) < MAX_LOADS:
            self._loads.append(
                LoadTiming(
                    start_s=max(self._clock() - duration_s - self._arrived_s, 0.0),
                    duration_s=duration_s,
                    num_bytes=num_bytes,
                    num_blocks=num_blocks,
                    num_failed_blocks=num_failed_blocks,
                    source=source,
                )
            )

    def told(self, request_id: str, *, queue_s: float | None) -> RequestTimings:
        """The timings to send with the first token, which has just come."""
        return RequestTimings(
            request_id=request_id,
            first_token_s=self._clock() - self._arrived_s,
            queue_s=queue_s or 0.0,
            loads=tuple(self._loads),
            steps=tuple(self._steps),
        )
