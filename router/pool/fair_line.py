"""A fair queue for a scarce resource: each owner gets its turns, however many requests the others have."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

Item = TypeVar("Item")

MIN_ENTRIES = 64
"""Entries that left an owner's queue are removed only once there are at least this many."""


@dataclass(slots=True, kw_only=True, eq=False)
class Place(Generic[Item]):
    """An entry of the queue. ``order`` grows with each arrival; ``cost`` is how much of the resource it takes."""

    item: Item
    owner: str
    priority: int
    order: int
    cost: float
    is_left: bool = False


_Entry: TypeAlias = tuple[int, int, Place[Item]]


class FairLine(Generic[Item]):
    """Smaller priorities come first. Within a priority, owners take turns by the cost that they were given while they
    waited here, and each owner's items come in order of arrival. With one owner, that is the order of all.

    An owner saves up no turns while it has nothing here: it begins level with the owners that wait. So others overtake
    an owner's first item only a bounded number of times.

    Source: start-time fair queueing, Goyal, Vin, Cheng, SIGCOMM 1996; an owner's turn is charged when it is given.
    """

    def __init__(self) -> None:
        self._entries: dict[str, list[_Entry[Item]]] = {}
        self._numbers: dict[str, int] = {}
        self._given: dict[str, float] = {}
        self._now = 0.0

    def __len__(self) -> int:
        """How many items wait."""
        return sum(self._numbers.values())

    def __iter__(self) -> Iterator[Item]:
        """All items that wait, in no particular order."""
        return (place.item for entries in self._entries.values() for *_, place in entries if not place.is_left)

    def join(self, item: Item, *, owner: str, priority: int, order: int, cost: float) -> Place[Item]:
        """Add an item to the queue, until ``leave`` or ``serve``."""
        place = Place(item=item, owner=owner, priority=priority, order=order, cost=cost)
        if owner not in self._entries:
            self._entries[owner], self._numbers[owner] = [], 0
            self._given[owner] = max(self._given.get(owner, 0.0), self._now)
        heapq.heappush(self._entries[owner], (priority, order, place))
        self._numbers[owner] += 1
        return place

    def first(self) -> Place[Item] | None:
        """The item whose turn it is."""
        return min((entries[0][2] for entries in self._entries.values()), key=self._turn, default=None)

    def serve(self, place: Place[Item]) -> None:
        """Give an item its turn, charge its owner, and remove it."""
        self._now = max(self._now, self._given[place.owner])
        self._given[place.owner] += place.cost
        self.leave(place)

    def leave(self, place: Place[Item]) -> None:
        """Remove an item that got nothing. Idempotent.

        References to removed items, which may hold prompts, are dropped once they are the majority of their owner's
        entries, because the first item may wait for long while others come and go.
        """
        if place.is_left:
            return
        place.is_left = True
        owner, entries = place.owner, self._entries[place.owner]
        self._numbers[owner] -= 1
        if len(entries) > MIN_ENTRIES + 2 * self._numbers[owner]:
            entries[:] = [entry for entry in entries if not entry[2].is_left]
            heapq.heapify(entries)
        while entries and entries[0][2].is_left:
            heapq.heappop(entries)
        if not entries:
            del self._entries[owner], self._numbers[owner]
            if self._given[owner] <= self._now:
                del self._given[owner]

    def _turn(self, place: Place[Item]) -> tuple[int, float, int]:
        return place.priority, self._given[place.owner], place.order
