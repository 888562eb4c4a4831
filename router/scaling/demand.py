"""The load to come, by what came lately: the same requests again, as much closer together as their rate grows."""

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
"""What came in less than that is taken to have come in so much: a first request is no flood."""

NOISE = 2.0
"""Standard deviations of the count of arrivals by which it must have grown before that counts as growth. Then all of it
counts: of a load that does grow, what is taken off for chance is what is missing at its steepest."""

MAX_GROWTH = 3.0

TIGHT = 0.1
"""A worker's steps keep the gap that so large a share of its streams was promised, or a wider one."""


class Prompt(NamedTuple):
    """A prompt: when it came, in seconds after the window's begin, what must be computed of it, and what was cached.

    ``ttft_s``: within what its first token was promised; ``NEVER``: not at all.
    """

    at_s: float
    num_new_tokens: float
    num_cached_tokens: float
    ttft_s: float = NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The requests of ``window_s``, which are to come again ``pace`` times as fast.

    ``tokens_per_s``: what they generate in a second, at the pace at which they came. ``num_context_tokens``: what a
    stream among them reads on average. ``gaps_s``: what streams were promised between their tokens, the least first,
    each with the share of the streams; ``NEVER``: nothing.
    """

    prompts: Sequence[Prompt]
    window_s: float
    tokens_per_s: float
    num_context_tokens: float
    pace: float = 1.0
    gaps_s: Sequence[tuple[float, float]] = ()

    @property
    def rate(self) -> float:
        """Requests a second that are to come."""
        return len(self.prompts) / self.window_s * self.pace if self.window_s else 0.0

    @property
    def tight_gap_s(self) -> float:
        """The gap that ``TIGHT`` of the streams were promised, or a tighter one; ``NEVER``: fewer were promised any."""
        total = 0.0
        for gap_s, share in self.gaps_s:
            total += share
            if total >= TIGHT:
                return gap_s
        return NEVER

    @property
    def mean_ttft_s(self) -> float:
        """Within what first tokens were promised, on average; ``NEVER``: none was."""
        promised = [prompt.ttft_s for prompt in self.prompts if prompt.ttft_s < NEVER]
        return sum(promised) / len(promised) if promised else NEVER

    def times(self, factor: float) -> Demand:
        """So many times as much: the same requests, closer together."""
        return replace(self, pace=self.pace * factor)

    def without_streams(self) -> Demand:
        """As those see it who compute prompts alone."""
        return replace(self, tokens_per_s=0.0)

    def only(self, prompts: Sequence[Prompt]) -> Demand:
        """With these prompts alone, and all that is generated."""
        return replace(self, prompts=prompts)


def no_demand(promise: Promise) -> Demand:
    """Nothing is to come; what runs was promised this."""
    gaps_s = _shares([promised_seconds(promise.itl_ms)])
    return Demand(prompts=(), window_s=MIN_WINDOW_S, tokens_per_s=0.0, num_context_tokens=0.0, gaps_s=gaps_s)


def _shares(gaps_s: Sequence[float]) -> Sequence[tuple[float, float]]:
    return [(gap_s, number / len(gaps_s)) for gap_s, number in sorted(Counter(gaps_s).items())]


def demand_of(
    samples: Sequence[ArrivalSample], *, typical_output: float, horizon_s: float, promise: Promise = NO_PROMISE
) -> Demand:
    """What several routers were sent, as what comes in ``horizon_s``.

    What is not known yet of a request is what the others have on average; where nothing is known of any,
    ``typical_output`` tokens and nothing cached. Requests of which no router tells it were promised ``promise``. The
    window is the shortest of the routers that saw anything.
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
    """The rate of arrivals in ``horizon_s`` over that of the window, by the difference between its halves; at least 1.

    A difference that may be chance does not count. A load that falls is known to when it has fallen.
    """
    num_late = sum(at_s >= window_s / 2 for at_s in times_s)
    num_more = 2 * num_late - len(times_s)
    if num_more <= NOISE * math.sqrt(len(times_s)):
        return 1.0
    middle_s = window_s / 2  # between the middles of the halves
    ahead_s = window_s / 2 + horizon_s  # from the window's middle
    return min(1.0 + num_more / len(times_s) * ahead_s / middle_s, MAX_GROWTH)
