"""Counts of values by size: the buckets of a Prometheus histogram."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Distribution:
    """How many values were at most each bound, and their sum. Cheap enough for every token: one bisection."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, num_times: int = 1) -> None:
        """Take in a value, or the same value several times."""
        self._counts[bisect_left(self._bounds, value)] += num_times
        self.total += value * num_times

    @property
    def num_values(self) -> int:
        """How many values there were."""
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """Each bound as Prometheus writes it, with the number of values up to it; the last is ``+Inf``."""
        names = [*(_bound_text(bound) for bound in self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))


def _bound_text(bound: float) -> str:
    return str(float(bound))
