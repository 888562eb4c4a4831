"""Counters over all replicas of a pool, including departed ones: sums over live replicas alone would fall."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from engine.versions import across_versions

_MAX_REMEMBERED = 64
"""How many departed processes are kept, so that one that was only missed in a look-up is not counted twice."""

_MAX_FOLDED = 256
"""How many earlier ones are kept by name only, so that they are not added again when another router lists them."""


@across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class DepartedWorker:
    """A departed process and its counters."""

    replica_id: str
    incarnation: str
    counters: Mapping[str, float]


@across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class ForgottenWorkers:
    """The sums over processes that departed long ago, and the last ones' names: replica id and incarnation."""

    counters: Mapping[str, float]
    names: tuple[tuple[str, str], ...] = ()


class PoolCounters:
    """The newest counters of each process, by replica id and incarnation. Totals never fall.

    Reports can arrive out of order: one with lower counts than another of the same process is older, and is ignored.
    """

    def __init__(self) -> None:
        self._living: dict[str, tuple[str, Mapping[str, float]]] = {}
        self._departed: dict[tuple[str, str], Mapping[str, float]] = {}
        self._forgotten: Counter[str] = Counter()
        self._folded: deque[tuple[str, str]] = deque(maxlen=_MAX_FOLDED)

    def note(self, replica_id: str, incarnation: str, counters: Mapping[str, float]) -> None:
        """Take the counters of a report. A new incarnation under the same id replaces the one before."""
        known = self._living.get(replica_id)
        if known is None or known[0] != incarnation:
            before = self._departed.pop((replica_id, incarnation), {})
            self._depart(replica_id)
        else:
            before = known[1]
            if before == counters:  # true for most messages: reports change at most ten times a second
                return
        is_older = any(counters.get(name, 0) < value for name, value in before.items())
        self._living[replica_id] = (incarnation, before if is_older else dict(counters))

    def keep(self, replica_ids: Collection[str]) -> None:
        """Move all other replicas to the departed."""
        for replica_id in [known for known in self._living if known not in replica_ids]:
            self._depart(replica_id)

    def learn(self, departed: Iterable[DepartedWorker], forgotten: ForgottenWorkers | None = None) -> None:
        """Add departed processes that another router knows and this one does not.

        ``forgotten`` is used only if this router has forgotten no process itself, for example if it is new: two sums
        may overlap, and nobody could tell.
        """
        if forgotten is not None and not self._folded:
            for key in forgotten.names:
                self._departed.pop(key, None)
            self._forgotten.update(forgotten.counters)
            self._folded.extend(forgotten.names)
        for worker in departed:
            key = (worker.replica_id, worker.incarnation)
            living = self._living.get(worker.replica_id)
            if (
                key not in self._departed
                and key not in self._folded
                and (living is None or living[0] != worker.incarnation)
            ):
                self._remember(key, worker.counters)

    def departed(self) -> tuple[DepartedWorker, ...]:
        """The departed processes that are still kept."""
        return tuple(
            DepartedWorker(replica_id=replica_id, incarnation=incarnation, counters=counters)
            for (replica_id, incarnation), counters in self._departed.items()
        )

    def forgotten(self) -> ForgottenWorkers:
        """The sums over processes that departed before those."""
        return ForgottenWorkers(counters=dict(self._forgotten), names=tuple(self._folded))

    def by_replica(self) -> Mapping[str, Mapping[str, float]]:
        """The counters by replica id, summed over its incarnations.

        Forgotten processes have no row: one row for all of them would jump whenever one more is forgotten.
        """
        sums: dict[str, Counter[str]] = {}
        for (replica_id, _), counters in self._departed.items():
            sums.setdefault(replica_id, Counter()).update(counters)
        for replica_id, (_, counters) in self._living.items():
            sums.setdefault(replica_id, Counter()).update(counters)
        return sums

    def total(self) -> Mapping[str, float]:
        """The sums over all processes that ever reported."""
        sums = Counter(self._forgotten)
        for counters in self.by_replica().values():
            sums.update(counters)
        return sums

    def _depart(self, replica_id: str) -> None:
        known = self._living.pop(replica_id, None)
        if known is None:
            return
        self._remember((replica_id, known[0]), known[1])

    def _remember(self, key: tuple[str, str], counters: Mapping[str, float]) -> None:
        self._departed[key] = counters
        if len(self._departed) > _MAX_REMEMBERED:
            oldest = next(iter(self._departed))
            self._forgotten.update(self._departed.pop(oldest))
            self._folded.append(oldest)
