"""What all replicas of a pool counted, those included that are gone: sums of the living alone would fall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

_MAX_REMEMBERED = 64
"""So many departed processes can come back (a look-up of the members that missed one) without being counted twice."""


class PoolCounters:
    """The newest counters of each process, by replica id and incarnation. No total ever falls.

    Reports can overtake each other: one that says less than another of the same process is older, and is ignored.
    """

    def __init__(self) -> None:
        self._living: dict[str, tuple[str, Mapping[str, float]]] = {}
        self._departed: dict[tuple[str, str], Mapping[str, float]] = {}
        self._forgotten: Counter[str] = Counter()

    def note(self, replica_id: str, incarnation: str, counters: Mapping[str, float]) -> None:
        """Take the counters of a report. Another incarnation under the same id takes the place of the one before."""
        known = self._living.get(replica_id)
        if known is None or known[0] != incarnation:
            before = self._departed.pop((replica_id, incarnation), {})
            self._depart(replica_id)
        else:
            before = known[1]
        is_older = any(counters.get(name, 0) < value for name, value in before.items())
        self._living[replica_id] = (incarnation, before if is_older else dict(counters))

    def keep(self, replica_ids: Collection[str]) -> None:
        """Count all other replicas among the departed."""
        for replica_id in [known for known in self._living if known not in replica_ids]:
            self._depart(replica_id)

    def departed(self) -> Mapping[str, float]:
        """The sums over the processes that are gone."""
        sums = Counter(self._forgotten)
        for counters in self._departed.values():
            sums.update(counters)
        return sums

    def total(self) -> Mapping[str, float]:
        """The sums over all processes that ever reported."""
        sums = Counter(self.departed())
        for _, counters in self._living.values():
            sums.update(counters)
        return sums

    def _depart(self, replica_id: str) -> None:
        known = self._living.pop(replica_id, None)
        if known is None:
            return
        self._departed[replica_id, known[0]] = known[1]
        if len(self._departed) > _MAX_REMEMBERED:
            self._forgotten.update(self._departed.pop(next(iter(self._departed))))
