"""Under overload, requests whose TTFT promise is lost let those pass whose promise can be kept. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from engine.scheduler.live_requests import LiveRequests
from engine.scheduler.remote.prefix_search import PrefixSearch
from engine.scheduler.requests.request import Request

Pace: TypeAlias = Callable[[float, float], float]
"""The seconds that a number of prompt tokens takes at the present pace, when a number of tokens is computed already."""


class LostPromises:
    """Defers waiting requests whose first token would be late even if they were served next.

    When more requests come than can be served, serving them in order of arrival makes every one a little late, and no
    promise is kept. Deferring those that are late already keeps most promises. Source of the idea: Robust Earliest
    Deadline scheduling (Buttazzo, Stankovic 1993), which sets aside for later what overload has made late.
    """

    def __init__(self, live_requests: LiveRequests, *, search: PrefixSearch, clock: Callable[[], float]) -> None:
        self._live_requests = live_requests
        self._search = search
        self._clock = clock

    @property
    def may_be_any(self) -> bool:
        """True when the first request that is not deferred was promised a TTFT."""
        first = self._live_requests.waiting.peek_in_time()
        return first is not None and first.message.promise.ttft_ms is not None

    def defer(self, pace: Pace, *, num_ahead: float) -> None:
        """Defer requests at the head whose promise is lost, given ``num_ahead`` tokens of running prompts."""
        waiting = self._live_requests.waiting
        while (request := waiting.peek_in_time()) is not None and self._is_lost(request, pace, num_ahead):
            waiting.defer(request)

    def _is_lost(self, request: Request, pace: Pace, num_ahead: float) -> bool:
        left_s = first_token_left_s(request, self._clock())
        if left_s is None or request.num_preemptions:
            return False  # a preempted request was served already
        if left_s <= 0.0:
            return True
        if pace(num_ahead + request.num_tokens, 0.0) <= left_s:
            return False
        num_known = self._search.num_known_tokens(request)
        if num_known is None:
            return False
        return pace(num_ahead + request.num_tokens - num_known, num_known) > left_s


def first_token_left_s(request: Request, now_s: float) -> float | None:
    """Seconds until a request's first token is due, negative if it is late; None without such a promise here, or once
    it has come.
    """
    ttft_ms = request.message.promise.ttft_ms
    if ttft_ms is None or request.num_tokens > request.num_prompt_tokens or request.kv_transfer is not None:
        return None
    return request.queued_at_s + ttft_ms / 1e3 - now_s
