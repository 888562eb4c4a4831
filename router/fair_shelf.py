"""A bounded store that several owners share; no owner can evict what others keep within their equal shares."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")

MIN_NOTES = 64
"""Outdated notes are removed only once there are at least this many notes."""


_Note: TypeAlias = tuple[int, int, str]
"""Minus what an owner holds, a growing number, and the owner: among equals the longest unchanged one sorts first."""


@dataclass(frozen=True, slots=True)
class _Kept(Generic[Item]):
    item: Item
    owner: str
    size: int


class FairShelf(Generic[Key, Item]):
    """Items by key, oldest first, bounded in count and total size.

    If there are too many items, the owner with most items loses its oldest one. If they are too large, the owner with
    the largest total does; its oldest item may be the new one. So no owner loses anything while it uses no more than
    the room divided by the number of owners. A put takes logarithmic time.
    """

    def __init__(self, *, max_count: int, max_size: int | None = None) -> None:
        self._max_count, self._max_size = max_count, max_size
        self._kept: OrderedDict[Key, _Kept[Item]] = OrderedDict()
        self._keys_of: dict[str, OrderedDict[Key, None]] = {}
        self._counts, self._sizes = _Holders(), _Holders()
        self._size = 0

    @property
    def num_kept(self) -> int:
        """Number of items."""
        return len(self._kept)

    @property
    def size(self) -> int:
        """Total size of the items."""
        return self._size

    @property
    def num_noted(self) -> int:
        """Number of notes on how much each owner holds: a few for each owner."""
        return self._counts.num_noted + self._sizes.num_noted

    def put(self, key: Key, item: Item, *, owner: str, size: int = 0) -> None:
        """Store an item, replacing one with the same key. An item larger than the whole shelf changes nothing."""
        if self._max_count == 0 or (self._max_size is not None and size > self._max_size):
            return
        self.pop(key)
        self._kept[key] = _Kept(item, owner, size)
        self._keys_of.setdefault(owner, OrderedDict())[key] = None
        self._note(owner, 1, size)
        while len(self._kept) > self._max_count:
            self._drop_oldest_of(self._counts.greatest())
        while self._max_size is not None and self._size > self._max_size:
            self._drop_oldest_of(self._sizes.greatest())

    def get(self, key: Key) -> Item | None:
        """The item with this key."""
        kept = self._kept.get(key)
        return None if kept is None else kept.item

    def pop(self, key: Key) -> Item | None:
        """Remove and return the item with this key."""
        kept = self._kept.pop(key, None)
        if kept is None:
            return None
        keys = self._keys_of[kept.owner]
        del keys[key]
        if not keys:
            del self._keys_of[kept.owner]
        self._note(kept.owner, -1, -kept.size)
        return kept.item

    def oldest(self) -> Item | None:
        """The item that was put first."""
        return next((kept.item for kept in self._kept.values()), None)

    def newest_first(self) -> Iterator[Item]:
        """Every item."""
        return (kept.item for kept in reversed(self._kept.values()))

    def _drop_oldest_of(self, owner: str) -> None:
        self.pop(next(iter(self._keys_of[owner])))

    def _note(self, owner: str, count: int, size: int) -> None:
        self._size += size
        self._counts.change(owner, count)
        self._sizes.change(owner, size)


class _Holders:
    """How much each owner holds. A heap of notes finds the greatest; only the last note of each owner is valid."""

    def __init__(self) -> None:
        self._true: dict[str, _Note] = {}
        self._notes: list[_Note] = []
        self._serial = 0

    @property
    def num_noted(self) -> int:
        return len(self._notes)

    def change(self, owner: str, by: int) -> None:
        """Add to what an owner holds; negative to subtract."""
        if not by:
            return
        last = self._true.pop(owner, None)
        amount = by if last is None else by - last[0]
        if not amount:
            return
        self._serial += 1
        note = self._true[owner] = (-amount, self._serial, owner)
        heapq.heappush(self._notes, note)
        if len(self._notes) > MIN_NOTES + 2 * len(self._true):
            self._notes = sorted(self._true.values())

    def greatest(self) -> str:
        """The owner who holds most. Some owner must hold something."""
        while True:
            note = self._notes[0]
            owner = note[2]
            if self._true.get(owner) == note:
                return owner
            heapq.heappop(self._notes)
