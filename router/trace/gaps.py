"""The gaps between a request's tokens (inter-token latency), as a histogram of bounded size."""

from __future__ import annotations

import math
from typing import Any

NUM_LARGEST = 8
"""How many of the longest gaps are kept with their position."""

_STEPS = 16
"""Buckets per doubling: a percentile is right within 3 %."""


class Gaps:
    """Counts gaps in buckets of equal ratio. ``largest`` are the longest pauses, ``max_s`` the longest one."""

    __slots__ = ("_counts", "_last_s", "_least_kept_s", "largest", "max_s", "num")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._last_s: float | None = None
        self._least_kept_s = 0.0
        self.largest: list[tuple[float, float]] = []
        self.max_s = 0.0
        self.num = 0

    @property
    def has_begun(self) -> bool:
        """True once a token has arrived."""
        return self._last_s is not None

    def tokens(self, now_s: float, num_tokens: int = 1) -> None:
        """Tokens arrived together: each is counted with an equal part of the time since the tokens before them."""
        last_s, self._last_s = self._last_s, now_s
        if last_s is None:
            return
        gap_s = now_s - last_s
        self.num += num_tokens
        bucket = math.floor(math.log2(max(gap_s / num_tokens, 1e-9)) * _STEPS)
        self._counts[bucket] = self._counts.get(bucket, 0) + num_tokens
        if gap_s > self._least_kept_s:
            self._keep(now_s, gap_s)

    def _keep(self, now_s: float, gap_s: float) -> None:
        self.max_s = max(self.max_s, gap_s)
        self.largest.append((gap_s, now_s))
        if len(self.largest) > NUM_LARGEST:
            self.largest.remove(min(self.largest))
            self._least_kept_s = min(self.largest)[0]

    def quantile_s(self, share: float) -> float | None:
        """The ``share`` quantile of the gaps, within 3 %; None if there are no gaps."""
        wanted, seen = share * self.num, 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= wanted:
                return min(_middle_s(bucket), self.max_s)
        return None

    def counts(self) -> list[tuple[float, int]]:
        """The histogram: pairs of a length in milliseconds and the number of gaps near it, the shortest first."""
        return [
            (round(min(_middle_s(bucket), self.max_s) * 1e3, 3), self._counts[bucket])
            for bucket in sorted(self._counts)
        ]

    def told(self, started_s: float) -> dict[str, Any]:
        """As JSON, times in milliseconds."""
        p50_s, p99_s = self.quantile_s(0.5), self.quantile_s(0.99)
        return {
            "count": self.num,
            "p50_ms": _ms(p50_s),
            "p99_ms": _ms(p99_s),
            "max_ms": _ms(self.max_s if self.num else None),
            "largest": [
                [_ms(at_s - gap_s - started_s), _ms(gap_s)] for gap_s, at_s in sorted(self.largest, reverse=True)
            ],
        }


def _middle_s(bucket: int) -> float:
    return float(2.0 ** ((bucket + 0.5) / _STEPS))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
