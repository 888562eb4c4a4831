"""A limited number of places that several API keys share, so that no key can take all of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Final, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

MOST_OF_FREE: Final = 0.75
"""Once there are several keys, each may hold at most this share of the places that the others do not hold."""


class KeyShares(Generic[Item]):
    """Tracks who holds the places; each item holds one.

    Until a second owner comes, the first may hold all places: so a router with one key, or none, has its whole limit.
    After that, the remaining places are left to owners with fewer. Places are never taken back.

    Source: dynamic thresholds of shared buffers, Choudhury, Hahne, IEEE/ACM Transactions on Networking 1998.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._owners: dict[Item, str] = {}
        self._numbers: Counter[str] = Counter()
        self._first_owner: str | None = None
        self._has_several_owners = False

    def __len__(self) -> int:
        """Number of places that are held."""
        return len(self._owners)

    def __iter__(self) -> Iterator[Item]:
        """The items that hold a place."""
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
        """The limit in words, for a refusal of ``num_places`` more."""
        is_share = len(self._owners) + num_places <= self._limit
        return f"the limit is {self._limit}{', and the remaining places are left to other keys' if is_share else ''}"

    def num_left(self, owner: str | None) -> int:
        """How many more places an owner may take now; None: the owner that may take most. Registers the owner."""
        if owner is None:
            return self._limit - len(self._owners)
        if self._first_owner is None:
            self._first_owner = owner
        self._has_several_owners |= owner != self._first_owner
        num_free, num_own = self._limit - len(self._owners), self._numbers[owner]
        if not self._has_several_owners:
            return num_free
        return max(min(num_free, math.ceil(MOST_OF_FREE * (num_free + num_own)) - num_own), 0)
