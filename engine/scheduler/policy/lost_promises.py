"""Prompts whose promise is lost let those pass whose promise can be kept. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from engine.scheduler.live_requests import LiveRequests
from engine.scheduler.remote.prefix_search import PrefixSearch
from engine.scheduler.requests.request import Request

Pace: TypeAlias = Callable[[float, float], float]
"""The seconds that so many tokens of prompts take as steps are now, behind so many that are there."""


class LostPromises:
    """Defers waiting requests whose first token would come too late even if they were the next to be served.

    Where more comes than can be served, whoever is served in the order of arrival is late, each by a little: nobody's
    promise is kept. So those give way that are too late already, and most promises are kept. Source of the idea: Robust
    Earliest Deadline scheduling (Buttazzo, Stankovic 1993), which sets aside what overload has made late, for later.
    """

    def __init__(self, live_requests: LiveRequests, *, search: PrefixSearch, clock: Callable[[], float]) -> None:
        self._live_requests = live_requests
        self._search = search
        self._clock = clock

    @property
    def may_be_any(self) -> bool:
        """True when the first of those that wait in time was promised its first token."""
        first = self._live_requests.waiting.peek_in_time()
        return first is not None and first.message.promise.ttft_ms is not None

    def defer(self, pace: Pace, *, num_ahead: float) -> None:
        """Look at the head of the queue, before which ``num_ahead`` tokens of running prompts are computed."""
        waiting = self._live_requests.waiting
        while (request := waiting.peek_in_time()) is not None and self._is_lost(request, pace, num_ahead):
            waiting.defer(request)

    def _is_lost(self, request: Request, pace: Pace, num_ahead: float) -> bool:
        left_s = first_token_left_s(request, self._clock())
        if left_s is None or request.num_preemptions:
            return False  # one that was preempted had its turn already
        if left_s <= 0.0:
            return True
        if pace(num_ahead + request.num_tokens, 0.0) <= left_s:
            return False
        num_known = self._search.num_known_tokens(request)
        if num_known is None:
            return False
        return pace(num_ahead + request.num_tokens - num_known, num_known) > left_s


def first_token_left_s(request: Request, now_s: float) -> float | None:
    """How long a request's first token may still take, less than 0 if it is late; None where it was not promised one
    here, or has had it."""
    ttft_ms = request.message.promise.ttft_ms
    if ttft_ms is None or request.num_tokens > request.num_prompt_tokens or request.kv_transfer is not None:
        return None
    return request.queued_at_s + ttft_ms / 1e3 - now_s
