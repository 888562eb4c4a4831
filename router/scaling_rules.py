"""By what rules pools follow the promises: how many workers they may have, and how fast they change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBounds:
    """The fewest and the most workers of a pool. Equal ones: it keeps its number."""

    least: int
    most: int

    def clamp(self, number: int) -> int:
        """The nearest number that is allowed."""
        return min(max(number, self.least), self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRules:
    """``pools`` are those that follow the promises, by their roles.

    target: share of the requests that any number of workers could serve in time which should be.
    window_s: what came in so much time is taken to come again.
    hold_s: so long fewer workers must have been enough before some are drained.
    start_s: how long a worker takes to start, until one was seen to.
    """

    pools: Mapping[str, PoolBounds]
    target: float = 0.99
    window_s: float = 60.0
    hold_s: float = 120.0
    start_s: float = 30.0
