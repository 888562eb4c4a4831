"""Forecasts the load: the recent requests once more, closer together by the growth of their rate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.contract.promise import NO_PROMISE, Promise
from router.placement.prediction import NEVER, promised_seconds
from router.report.arrivals import ArrivalSample

MIN_WINDOW_S = 10.0
"""The least window: arrivals over a shorter time are spread over this one, so that a first request is no flood."""

NOISE = 2.0
"""How many standard deviations the number of arrivals must grow by to count as growth. Then all of it counts: taking
off a part as chance would leave too few workers just when the load grows fastest."""

MAX_GROWTH = 3.0

TIGHT = 0.1
"""Steps keep the gap that is the ``TIGHT`` quantile of the streams' promised gaps."""


class Prompt(NamedTuple):
    """A prompt: when it arrived, in seconds after the window's start, how many tokens must be computed, and how many
    were cached.

    ``ttft_s``: its promised time to first token; ``NEVER``: no promise.
    """

    at_s: float
    num_new_tokens: float
    num_cached_tokens: float
    ttft_s: float = NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The forecast: the requests of the last ``window_s`` come again ``pace`` times as fast.

    ``tokens_per_s``: output tokens a second, at the original pace. ``num_context_tokens``: a stream's average context.
    ``gaps_s``: the promised gaps between tokens, the smallest first, each with its share of the streams; ``NEVER``: no
    promise.
    """

    prompts: Sequence[Prompt]
    window_s: float
    tokens_per_s: float
    num_context_tokens: float
    pace: float = 1.0
    gaps_s: Sequence[tuple[float, float]] = ()

    @property
    def rate(self) -> float:
        """Forecast requests a second."""
        return len(self.prompts) / self.window_s * self.pace if self.window_s else 0.0

    @property
    def tight_gap_s(self) -> float:
        """The ``TIGHT`` quantile of promised gaps; ``NEVER`` if fewer streams than that have a promise."""
        total = 0.0
        for gap_s, share in self.gaps_s:
            total += share
            if total >= TIGHT:
                return gap_s
        return NEVER

    @property
    def mean_ttft_s(self) -> float:
        """Mean promised time to first token; ``NEVER`` if there is no promise."""
        promised = [prompt.ttft_s for prompt in self.prompts if prompt.ttft_s < NEVER]
        return sum(promised) / len(promised) if promised else NEVER

    def times(self, factor: float) -> Demand:
        """The same requests at ``factor`` times the pace."""
        return replace(self, pace=self.pace * factor)

    def without_streams(self) -> Demand:
        """The demand without decode, for workers that compute prompts only."""
        return replace(self, tokens_per_s=0.0)

    def only(self, prompts: Sequence[Prompt]) -> Demand:
        """The demand with these prompts only, but with all of the decode."""
        return replace(self, prompts=prompts)


def no_demand(promise: Promise) -> Demand:
    """A demand without requests; the running streams have this promise."""
    gaps_s = _shares([promised_seconds(promise.itl_ms)])
    return Demand(prompts=(), window_s=MIN_WINDOW_S, tokens_per_s=0.0, num_context_tokens=0.0, gaps_s=gaps_s)


def _shares(gaps_s: Sequence[float]) -> Sequence[tuple[float, float]]:
    return [(gap_s, number / len(gaps_s)) for gap_s, number in sorted(Counter(gaps_s).items())]


def demand_of(
    samples: Sequence[ArrivalSample], *, typical_output: float, horizon_s: float, promise: Promise = NO_PROMISE
) -> Demand:
    """The forecast for ``horizon_s`` ahead, from the recent arrivals of several routers.

    Unknown numbers of a request are the mean of the others'; if none is known, ``typical_output`` tokens and nothing
    cached. A request whose promise was not reported has ``promise``. The window is the shortest one among the routers
    that had arrivals.
    """
    seen = [sample for sample in samples if sample.arrivals]
    if not seen:
        return no_demand(promise)
    window_s = max(min(sample.window_s for sample in seen), MIN_WINDOW_S)
    all_told = (item for sample in seen for item in sample.told() if item.age_s <= window_s)
    told = sorted(all_told, key=lambda item: item.age_s, reverse=True)
    if not told:
        return no_demand(promise)
    outputs = [item.num_output_tokens for item in told if item.num_output_tokens >= 0]
    num_output = sum(outputs) / len(outputs) if outputs else typical_output
    with_cached = [item for item in told if item.num_cached_tokens >= 0]
    num_known = sum(item.num_prompt_tokens for item in with_cached)
    cached_share = sum(item.num_cached_tokens for item in with_cached) / num_known if num_known else 0.0
    prompts = []
    num_generated = 0.0
    for item in told:
        cached = float(item.num_cached_tokens) if item.num_cached_tokens >= 0 else cached_share * item.num_prompt_tokens
        new = max(item.num_prompt_tokens - cached, 1.0)
        ttft_s = promised_seconds((item.promise or promise).ttft_ms)
        prompts.append(Prompt(window_s - item.age_s, new, cached, ttft_s))
        num_generated += item.num_output_tokens if item.num_output_tokens >= 0 else num_output
    num_prompt_tokens = sum(item.num_prompt_tokens for item in told) / len(told)
    return Demand(
        prompts=prompts,
        window_s=window_s,
        tokens_per_s=num_generated / window_s,
        num_context_tokens=num_prompt_tokens + num_generated / len(told) / 2,
        pace=growth([prompt.at_s for prompt in prompts], window_s=window_s, horizon_s=horizon_s),
        gaps_s=_shares([promised_seconds((item.promise or promise).itl_ms) for item in told]),
    )


def growth(times_s: Sequence[float], *, window_s: float, horizon_s: float) -> float:
    """The ratio of the arrival rate ``horizon_s`` ahead to the rate of the window; at least 1.

    It extrapolates the difference between the window's halves, unless that may be chance. A fall is never extrapolated.
    """
    num_late = sum(at_s >= window_s / 2 for at_s in times_s)
    num_more = 2 * num_late - len(times_s)
    if num_more <= NOISE * math.sqrt(len(times_s)):
        return 1.0
    middle_s = window_s / 2  # between the middles of the halves
    ahead_s = window_s / 2 + horizon_s  # from the window's middle
    return min(1.0 + num_more / len(times_s) * ahead_s / middle_s, MAX_GROWTH)
