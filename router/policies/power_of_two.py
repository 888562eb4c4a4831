"""The better one of two at random: nearly as good as the best, and no herd when reports are old."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.candidate import Ask, CandidateT
from router.policies.kv_usage import lowest_kv_usage


class PowerOfTwo:
    """Two candidates at random, then the one with the lower KV usage.

    Source: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001.
    """

    def __init__(self, source: random.Random | None = None) -> None:
        self._source = source or random.Random()

    def __call__(self, candidates: Sequence[CandidateT], ask: Ask, /) -> CandidateT:
        """The better one of two."""
        if len(candidates) <= 2:
            return lowest_kv_usage(candidates, ask)
        return lowest_kv_usage(self._source.sample(candidates, 2), ask)
