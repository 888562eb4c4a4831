"""Policies that ignore load, as baselines for the others: round robin and random."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.candidate import Ask, CandidateT


class RoundRobin:
    """Cycles through the replicas in the order of their names, even as replicas come and go."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, candidates: Sequence[CandidateT], _: Ask, /) -> CandidateT:
        """The next replica after the last one chosen."""
        last = self._last
        after = [item for item in candidates if item.replica_id > last]
        chosen = min(after or candidates, key=lambda item: item.replica_id)
        self._last = chosen.replica_id
        return chosen


class RandomChoice:
    """Each candidate is equally likely."""

    def __init__(self, source: random.Random | None = None) -> None:
        self._source = source or random.Random()

    def __call__(self, candidates: Sequence[CandidateT], _: Ask, /) -> CandidateT:
        """One at random."""
        return self._source.choice(candidates)
