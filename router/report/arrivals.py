"""What requests came lately, and what they turned out to be: what a prediction of the load to come goes by."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.contract.promise import NO_PROMISE, Promise
from engine.versions import across_versions

MAX_ARRIVALS = 1024
"""So many are remembered. Where they come faster, those of a shorter time."""


class Arrival:
    """One request. What of its prompt was cached, and how much it generates, is known later, if at all (None)."""

    __slots__ = ("at_s", "num_cached_tokens", "num_output_tokens", "num_prompt_tokens", "promise")

    def __init__(self, at_s: float, num_prompt_tokens: int, promise: Promise) -> None:
        self.at_s = at_s
        self.num_prompt_tokens = num_prompt_tokens
        self.promise = promise
        self.num_cached_tokens: int | None = None
        self.num_output_tokens: int | None = None


class Told(NamedTuple):
    """An arrival as routers tell each other of it: ``age_s`` before the sample was taken; -1, and None for what it was
    promised, where that is not known.
    """

    age_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    promise: Promise | None = None


@across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalSample:
    """All that came to a router in the last ``window_s``, oldest first. ``promises``: ttft_ms and itl_ms of each; empty
    from a router that does not tell.
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
        """A request came; who runs it fills in the rest."""
        arrival = Arrival(self._clock(), num_prompt_tokens, promise)
        self._arrivals.append(arrival)
        return arrival

    def sample(self) -> ArrivalSample:
        """Those of the window, or of as much of it as is remembered."""
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
