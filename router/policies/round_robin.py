"""One replica after the other."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.candidate import CandidateT


class RoundRobin:
    """Goes through the replicas in the order of their names, whoever is there."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, candidates: Sequence[CandidateT], /) -> CandidateT:
        """The next replica after the last one chosen."""
        after = [item for item in candidates if item.replica_id > self._last]
        chosen = min(after or candidates, key=lambda item: item.replica_id)
        self._last = chosen.replica_id
        return chosen
