"""The rules of autoscaling by promises: how many workers pools may have, and how fast pools change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBounds:
    """The fewest and the most workers of a pool. If both are equal, the pool keeps its number."""

    least: int
    most: int

    def clamp(self, number: int) -> int:
        """The nearest allowed number."""
        return min(max(number, self.least), self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRules:
    """How pools that follow the promises are sized. ``pools`` has their smallest and largest sizes, by role.

    target: the share of requests that should keep their promise, among those that any number of workers could serve in
        time.
    window_s: the load of the last ``window_s`` seconds is assumed to repeat.
    hold_s: seconds for which fewer workers must have been enough before some are drained.
    start_s: the assumed start time of a worker, until one has been observed.
    """

    pools: Mapping[str, PoolBounds]
    target: float = 0.99
    window_s: float = 60.0
    hold_s: float = 120.0
    start_s: float = 30.0
