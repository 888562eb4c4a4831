"""The recent share of a worker's time that went into prompts, from the counters in its reports."""

from __future__ import annotations

from engine.contract.messages import LoadReport

WINDOW_S = 1.0
NEW_WEIGHT = 0.3
"""Weight of the newest window in the moving average: it follows a change of load within a few seconds."""


def num_prompt_tokens(load: LoadReport) -> float:
    """Prompt tokens that a worker has computed since it started."""
    return load.counters.get("num_scheduled_tokens", 0.0) - load.counters.get("num_generated_tokens", 0.0)


class PromptShare:
    """A moving average over windows of ``WINDOW_S``; ``value`` is 0 to 1."""

    __slots__ = ("_num_tokens", "_since_s", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._num_tokens: float | None = None
        self._since_s = 0.0

    def note(self, load: LoadReport, now_s: float) -> None:
        """Update the average from a report."""
        passed_s = now_s - self._since_s
        if self._num_tokens is not None and passed_s < WINDOW_S:
            return
        num_tokens = num_prompt_tokens(load)
        if self._num_tokens is not None:
            seconds = max(num_tokens - self._num_tokens, 0.0) * load.step_time.prompt_token_s
            self.value += NEW_WEIGHT * (min(seconds / passed_s, 1.0) - self.value)
        self._num_tokens, self._since_s = num_tokens, now_s
