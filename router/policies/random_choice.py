"""Any replica: what the others are measured against."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.candidate import Ask, CandidateT


class RandomChoice:
    """Each candidate is equally likely."""

    def __init__(self, source: random.Random | None = None) -> None:
        self._source = source or random.Random()

    def __call__(self, candidates: Sequence[CandidateT], _: Ask, /) -> CandidateT:
        """One at random."""
        return self._source.choice(candidates)
