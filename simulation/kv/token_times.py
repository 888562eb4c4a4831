"""The times of tokens that a worker reports together, as if its clients had seen them one by one."""

from __future__ import annotations

from collections.abc import Sequence


class TokenTimes:
    """Keeps the times of tokens, by request, until they are taken. Tokens without a kept time count as arriving now."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[float]] = {}

    def add(self, request_id: str, times_s: Sequence[float]) -> None:
        """Keep the times of tokens, one each, that will be reported later."""
        self._waiting.setdefault(request_id, []).extend(times_s)

    def take(self, request_id: str, *, num_tokens: int, now_s: float) -> list[float]:
        """The times of the events for ``num_tokens`` tokens that are reported now."""
        times_s = self._waiting.pop(request_id, [])
        return times_s if len(times_s) >= num_tokens else [*times_s, now_s]
