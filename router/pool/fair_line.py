"""A line in front of something scarce, in which several owners stand: each gets its turns, however many others ask."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

Item = TypeVar("Item")

MIN_ENTRIES = 64
"""An owner's part of the line is not rid of those who left it before there are so many."""


@dataclass(slots=True, kw_only=True, eq=False)
class Place(Generic[Item]):
    """Where somebody stands. ``order`` grows with each that comes, ``cost`` is what it takes of what is scarce."""

    item: Item
    owner: str
    priority: int
    order: int
    cost: float
    is_left: bool = False


_Entry: TypeAlias = tuple[int, int, Place[Item]]


class FairLine(Generic[Item]):
    """Smaller priorities come first. Of the same one, owners take turns by what they were given while they stood here;
    what is one owner's comes in the order of arrival. Where there is one owner, that is the order of all.

    Whoever was not here for a while has no turns saved up: an owner begins where those who stand here are. So the first
    of an owner is passed by others no more often than what it waited for allows.

    Source: start-time fair queueing, Goyal, Vin, Cheng, SIGCOMM 1996; an owner's turn is charged when it is given.
    """

    def __init__(self) -> None:
        self._entries: dict[str, list[_Entry[Item]]] = {}
        self._numbers: dict[str, int] = {}
        self._given: dict[str, float] = {}
        self._now = 0.0

    def __len__(self) -> int:
        """How many stand here."""
        return sum(self._numbers.values())

    def __iter__(self) -> Iterator[Item]:
        """Everybody who stands here, in no particular order."""
        return (place.item for entries in self._entries.values() for *_, place in entries if not place.is_left)

    def join(self, item: Item, *, owner: str, priority: int, order: int, cost: float) -> Place[Item]:
        """Stand in the line until ``leave`` or ``serve``."""
        place = Place(item=item, owner=owner, priority=priority, order=order, cost=cost)
        if owner not in self._entries:
            self._entries[owner], self._numbers[owner] = [], 0
            self._given[owner] = max(self._given.get(owner, 0.0), self._now)
        heapq.heappush(self._entries[owner], (priority, order, place))
        self._numbers[owner] += 1
        return place

    def first(self) -> Place[Item] | None:
        """Whose turn it is."""
        return min((entries[0][2] for entries in self._entries.values()), key=self._turn, default=None)

    def serve(self, place: Place[Item]) -> None:
        """Give somebody its turn, and take it out of the line."""
        self._now = max(self._now, self._given[place.owner])
        self._given[place.owner] += place.cost
        self.leave(place)

    def leave(self, place: Place[Item]) -> None:
        """Take somebody out of the line who got nothing. Idempotent.

        What is kept of those who left, prompts perhaps, goes as soon as they are most of their owner's: whoever is
        first may stand here for long while others come and go.
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
