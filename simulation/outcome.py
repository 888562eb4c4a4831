"""The outcome of a load: the times of each request's tokens, and the figures of all requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from engine.contract.promise import NO_PROMISE, Promise

GAP_SHARE = 0.9
"""Share of a request's gaps that must keep the promise."""


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the values lie; nan if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One request as its client saw it, in seconds on one clock. ``error`` says why it did not end well. ``promise`` is
    the promise that the request itself asked for.
    """

    sent_s: float
    kind: str = ""
    num_prompt_tokens: int = 0
    token_times_s: list[float] = field(default_factory=list, repr=False)
    num_tokens: int = 0
    error: str | None = None
    promise: Promise = NO_PROMISE

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token (TTFT); infinite if there was none."""
        return self.token_times_s[0] - self.sent_s if self.token_times_s else math.inf

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive events of tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times_s)]

    def keeps(self, promise: Promise) -> bool:
        """True when TTFT and 90 % of the gaps are within the promise: the request's own, or else the given one."""
        promise = self.promise.over(promise)
        if self.error is not None or (promise.ttft_ms is not None and self.ttft_s * 1e3 > promise.ttft_ms):
            return False
        gaps = self.gaps_s
        return not gaps or promise.itl_ms is None or percentile(gaps, GAP_SHARE) * 1e3 <= promise.itl_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A load in numbers. ``goodput``: requests per second that kept the promise, over the time in which requests
    arrived. So a cluster gains nothing from a shorter last answer. ``seconds``: from the first request to the last
    token. ``utilisation``: the mean share of this time in which workers computed.
    """

    num_requests: int
    num_failed: int
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    goodput: float
    share_good: float
    tokens_per_s: float
    utilisation: float = math.nan
    seconds: float = math.nan

    def values(self) -> Mapping[str, float]:
        """All figures by name."""
        return asdict(self)


def _rate(times_s: Sequence[float], seconds: float) -> float:
    """Requests per second that arrived at these times. If all arrived at once, ``seconds`` is the duration instead."""
    between_s = max(times_s) - min(times_s)
    return (len(times_s) - 1) / between_s if between_s else len(times_s) / seconds


def figures(outcomes: Sequence[Outcome], promise: Promise, *, busy_s: Sequence[float] = ()) -> Figures:
    """The numbers of a load; ``busy_s`` is how long each worker computed."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    ttfts = [outcome.ttft_s * 1e3 for outcome in good]
    gaps = [gap * 1e3 for outcome in good for gap in outcome.gaps_s]
    first = min((outcome.sent_s for outcome in outcomes), default=0.0)
    last = max((outcome.token_times_s[-1] for outcome in good), default=first)
    seconds = max(last - first, 1e-9)
    share_kept = sum(outcome.keeps(promise) for outcome in outcomes) / len(outcomes) if outcomes else math.nan
    return Figures(
        num_requests=len(outcomes),
        num_failed=len(outcomes) - len(good),
        ttft_p50_ms=percentile(ttfts, 0.5),
        ttft_p90_ms=percentile(ttfts, 0.9),
        ttft_p99_ms=percentile(ttfts, 0.99),
        itl_p50_ms=percentile(gaps, 0.5),
        itl_p99_ms=percentile(gaps, 0.99),
        goodput=share_kept * _rate([outcome.sent_s for outcome in outcomes], seconds) if outcomes else 0.0,
        share_good=100 * share_kept,
        tokens_per_s=sum(outcome.num_tokens for outcome in good) / seconds,
        utilisation=100 * sum(busy_s) / len(busy_s) / seconds if busy_s else math.nan,
        seconds=seconds,
    )
