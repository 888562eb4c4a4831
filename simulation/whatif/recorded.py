"""The requests that a cluster's routers recorded: as a load, and with the times that they really got."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from engine.contract.token_ids import TokenIds
from simulation.loads import Arrival, LoadError, scaled_length
from simulation.outcome import Outcome
from simulation.whatif.parts import Part, tokens_named


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """One request that ended well. ``at_s`` is on a clock that all requests share. ``num_cached_tokens`` tokens of its
    prompt were cached, and not computed. ``gaps``: a histogram of the times between its tokens, in milliseconds.
    ``other_outputs``: the tokens of further choices of its prompt. Further prompts of a body are requests of their own.
    """

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    ttft_ms: float | None = None
    gaps: Sequence[tuple[float, int]] = ()
    other_outputs: Sequence[int] = ()

    @property
    def outcome(self) -> Outcome | None:
        """The outcome that it really had, with its gaps in arbitrary order; None if no TTFT was recorded."""
        if self.ttft_ms is None:
            return None
        first_s = self.at_s + self.ttft_ms / 1e3
        gaps_s = [gap_ms / 1e3 for gap_ms, count in self.gaps for _ in range(count)]
        return Outcome(
            sent_s=self.at_s,
            num_prompt_tokens=self.num_prompt_tokens,
            token_times_s=list(accumulate(gaps_s, initial=first_s)),
            num_tokens=self.num_output_tokens + sum(self.other_outputs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSource:
    """Requests with the lengths, the times and the cached prefixes that they had.

    A cached prefix is assumed to be the beginning of the last earlier request that was long enough, because routers
    know how much of a prompt was cached, but not from which request. What was cached before the first one is computed.
    """

    requests: Sequence[RecordedRequest]
    part: Part = field(default_factory=Part)

    def outcomes(self) -> list[Outcome]:
        """The outcomes that the requests of this part really had; empty if times or lengths were changed."""
        if (self.part.speed, self.part.scale) != (1.0, 1):
            return []
        first_s = min((request.at_s for request in self.requests), default=0.0)
        found = (request.outcome for request in self.requests if self.part.has(request.at_s - first_s))
        return [outcome for outcome in found if outcome is not None]

    def load(self) -> list[Arrival]:
        """The arrivals in the order of their times; the first request's is 0.

        Raises:
            LoadError: There are none.
        """
        self.part.check()
        found = self.part.of(self._arrivals())
        if not found:
            seconds = "" if math.isinf(self.part.seconds) else f" for {self.part.seconds:g} s"
            raise LoadError(
                f"the cluster recorded {len(self.requests)} requests that ended well, none of them from second "
                f"{self.part.start_s:g} on{seconds}; routers keep the last `router.trace_requests`"
            )
        return found

    def _arrivals(self) -> list[Arrival]:
        """The arrivals of all requests."""
        scale, arrivals = self.part.scale, list[Arrival]()
        ordered = sorted(self.requests, key=lambda request: request.at_s)
        for number, request in enumerate(ordered):
            num_prompt = scaled_length(request.num_prompt_tokens, scale)
            tokens = tokens_named(f"recorded/{number}", num_prompt).astype("<i4")
            num_cached = min(request.num_cached_tokens // scale, num_prompt)
            earlier = (arrival.prompt for arrival in reversed(arrivals) if len(arrival.prompt) >= num_cached)
            if num_cached and (same := next(earlier, None)) is not None:
                tokens = np.concatenate([same.array[:num_cached], tokens[num_cached:]]).astype("<i4")
            arrivals.append(
                Arrival(
                    at_s=request.at_s - ordered[0].at_s,
                    prompt=TokenIds(tokens.tobytes()),
                    num_output_tokens=scaled_length(request.num_output_tokens, scale),
                    kind="recorded",
                    other_outputs=[scaled_length(num_tokens, scale) for num_tokens in request.other_outputs],
                )
            )
        return arrivals
