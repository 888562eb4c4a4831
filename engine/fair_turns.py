"""A few places that several owners share, by the time that each has used them. Free of torch."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class FairTurns(Generic[Item]):
    """Owners take turns at ``num_places`` places: whoever has used least time is next. Each owner's items come in order
    of arrival.

    Once a second owner has come, the last free place is left to owners that hold fewer, so that one whose items take
    long cannot hold all of them. An owner saves up no time while it has nothing here. Not thread-safe.

    Source: start-time fair queueing, Goyal, Vin, Cheng, SIGCOMM 1996; an owner is charged for what its items took.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._waiting: dict[str, OrderedDict[Item, None]] = {}
        self._owner_of: dict[Item, str] = {}
        self._running: dict[Item, str] = {}
        self._num_running: Counter[str] = Counter()
        self._used_s: dict[str, float] = {}
        self._now_s = 0.0
        self._first_owner: str | None = None
        self._has_several_owners = False

    def __len__(self) -> int:
        """How many items wait."""
        return len(self._owner_of)

    def __contains__(self, item: Item) -> bool:
        """True while an item waits."""
        return item in self._owner_of

    def join(self, item: Item, *, owner: str) -> None:
        """Have an item wait for its turn, until ``begin`` returns it or it leaves."""
        if self._first_owner is None:
            self._first_owner = owner
        self._has_several_owners |= owner != self._first_owner
        if owner not in self._waiting:
            self._waiting[owner] = OrderedDict()
            self._used_s[owner] = max(self._used_s.get(owner, 0.0), self._now_s)
        self._waiting[owner][item] = None
        self._owner_of[item] = owner

    def leave(self, item: Item) -> bool:
        """Take out an item that waits; False if it does not."""
        owner = self._owner_of.pop(item, None)
        if owner is None:
            return False
        del self._waiting[owner][item]
        if not self._waiting[owner]:
            del self._waiting[owner]
        self._forget(owner)
        return True

    def drop_all(self) -> None:
        """Take out all items that wait."""
        for item in tuple(self._owner_of):
            self.leave(item)

    def begin(self) -> Item | None:
        """The item whose turn it is, which holds a place until ``end``; None if no place is free for any that waits."""
        if len(self._running) >= self._num_places:
            return None
        most = max(self._num_places - 1, 1) if self._has_several_owners else self._num_places
        able = [owner for owner in self._waiting if self._num_running[owner] < most]
        owner = min(able, key=self._used_s.__getitem__, default=None)
        if owner is None:
            return None
        self._now_s = max(self._now_s, self._used_s[owner])
        item = next(iter(self._waiting[owner]))
        self._running[item] = owner
        self._num_running[owner] += 1
        self.leave(item)
        return item

    def end(self, item: Item, *, used_s: float) -> None:
        """Free the place of an item, and charge its owner for the time that it took."""
        owner = self._running.pop(item)
        self._num_running[owner] -= 1
        if not self._num_running[owner]:
            del self._num_running[owner]
        self._used_s[owner] = self._used_s.get(owner, self._now_s) + used_s
        self._forget(owner)

    def _forget(self, owner: str) -> None:
        """Drop the record of an owner that has nothing here, once all others have used as much."""
        if owner not in self._waiting and owner not in self._num_running and self._used_s[owner] <= self._now_s:
            del self._used_s[owner]
