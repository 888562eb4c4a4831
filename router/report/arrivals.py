"""Records recent requests and their actual sizes, from which the future load is predicted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.contract.promise import NO_PROMISE, Promise
from engine.versions import across_versions

MAX_ARRIVALS = 1024
"""How many arrivals are kept. If they come faster, the window is shorter."""


class Arrival:
    """One request. Its cached prompt tokens and its output tokens become known later, or never (None)."""

    __slots__ = ("at_s", "num_cached_tokens", "num_output_tokens", "num_prompt_tokens", "promise")

    def __init__(self, at_s: float, num_prompt_tokens: int, promise: Promise) -> None:
        self.at_s = at_s
        self.num_prompt_tokens = num_prompt_tokens
        self.promise = promise
        self.num_cached_tokens: int | None = None
        self.num_output_tokens: int | None = None


class Told(NamedTuple):
    """An arrival as routers exchange it: ``age_s`` before the sample was taken. Unknown numbers are -1, an unknown
    promise is None.
    """

    age_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    promise: Promise | None = None


@across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalSample:
    """All arrivals at a router in the last ``window_s``, oldest first. ``promises``: ttft_ms and itl_ms of each; empty
    if the router's version does not send them.
    """

    window_s: float = 0.0
    arrivals: tuple[tuple[float, int, int, int], ...] = ()
    promises: tuple[tuple[float | None, float | None], ...] = ()

    def told(self) -> Sequence[Told]:
        """The arrivals."""
        if not self.promises:
            return [Told(*item) for item in self.arrivals]
        promised = [Promise(ttft_ms=ttft_ms, itl_ms=itl_ms) for ttft_ms, itl_ms in self.promises]
        return [Told(*item, promise) for item, promise in zip(self.arrivals, promised, strict=True)]


NO_ARRIVALS = ArrivalSample()


class RecentArrivals:
    """The last requests of one router. Only its event loop uses it."""

    def __init__(self, *, window_s: float, clock: Callable[[], float]) -> None:
        self._window_s = window_s
        self._clock = clock
        self._began_s = clock()
        self._arrivals: deque[Arrival] = deque(maxlen=MAX_ARRIVALS)

    def note(self, num_prompt_tokens: int, promise: Promise = NO_PROMISE) -> Arrival:
        """Record a request; the code that runs it fills in the rest."""
        arrival = Arrival(self._clock(), num_prompt_tokens, promise)
        self._arrivals.append(arrival)
        return arrival

    def sample(self) -> ArrivalSample:
        """The arrivals of the window, or of the part of it that is still kept."""
        now_s, arrivals = self._clock(), self._arrivals
        while arrivals and now_s - arrivals[0].at_s > self._window_s:
            arrivals.popleft()
        window_s = min(self._window_s, now_s - self._began_s)
        if len(arrivals) == MAX_ARRIVALS:
            window_s = min(window_s, now_s - arrivals[0].at_s)
        return ArrivalSample(
            window_s=window_s,
            arrivals=tuple(_told(item, now_s) for item in arrivals),
            promises=tuple((item.promise.ttft_ms, item.promise.itl_ms) for item in arrivals),
        )


def _told(arrival: Arrival, now_s: float) -> tuple[float, int, int, int]:
    cached, output = arrival.num_cached_tokens, arrival.num_output_tokens
    return (
        now_s - arrival.at_s,
        arrival.num_prompt_tokens,
        -1 if cached is None else cached,
        -1 if output is None else output,
    )
