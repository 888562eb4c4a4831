"""When tokens came that a worker told together, as its clients would have seen them one by one."""

from __future__ import annotations

from collections.abc import Sequence


class TokenTimes:
    """The times of tokens by request, until they are asked for. Tokens that nothing is known of came when they did."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[float]] = {}

    def add(self, request_id: str, times_s: Sequence[float]) -> None:
        """One token came at each of these times, which are told later."""
        self._waiting.setdefault(request_id, []).extend(times_s)

    def take(self, request_id: str, *, num_tokens: int, now_s: float) -> list[float]:
        """When events of tokens were that are told now, ``num_tokens`` of them all together."""
        times_s = self._waiting.pop(request_id, [])
        return times_s if len(times_s) >= num_tokens else [*times_s, now_s]
