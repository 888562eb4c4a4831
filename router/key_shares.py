"""A limited number of places that several API keys share, of whom none can take all from the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Final, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

MOST_OF_FREE: Final = 0.75
"""Of the places that others do not hold, a key takes this share at most, once there are others."""


class KeyShares(Generic[Item]):
    """Who holds the places, each item one.

    Until a second owner comes the first may hold all: a router with one key, or with none, has its whole limit. The
    rest is left to whoever has less, and nothing that was given is taken back.

    Source: dynamic thresholds of shared buffers, Choudhury, Hahne, IEEE/ACM Transactions on Networking 1998.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._owners: dict[Item, str] = {}
        self._numbers: Counter[str] = Counter()
        self._first_owner: str | None = None
        self._has_several_owners = False

    def __len__(self) -> int:
        """How many places are held."""
        return len(self._owners)

    def __iter__(self) -> Iterator[Item]:
        """What holds a place."""
        return iter(self._owners)

    def add(self, item: Item, *, owner: str) -> None:
        """Hold a place until ``discard``. Idempotent."""
        if item not in self._owners:
            self._owners[item] = owner
            self._numbers[owner] += 1

    def discard(self, item: Item) -> None:
        """Give a place back. Idempotent."""
        owner = self._owners.pop(item, None)
        if owner is not None:
            self._numbers[owner] -= 1
            if not self._numbers[owner]:
                del self._numbers[owner]

    def limit_for(self, num_places: int) -> str:
        """The limit in words, for somebody who may not take so many more."""
        is_share = len(self._owners) + num_places <= self._limit
        return f"the limit is {self._limit}{', of which the rest is left to other keys' if is_share else ''}"

    def num_left(self, owner: str | None) -> int:
        """How many more an owner may take now, who is known from here on; None: whoever may take most."""
        if owner is None:
            return self._limit - len(self._owners)
        if self._first_owner is None:
            self._first_owner = owner
        self._has_several_owners |= owner != self._first_owner
        num_free, num_own = self._limit - len(self._owners), self._numbers[owner]
        if not self._has_several_owners:
            return num_free
        return max(min(num_free, math.ceil(MOST_OF_FREE * (num_free + num_own)) - num_own), 0)
