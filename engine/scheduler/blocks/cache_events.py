"""Changes of the prefix cache, in order, so that a router can mirror its index."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeAlias

from engine.contract.block_hash import BlockHash, block_key
from engine.contract.messages import CacheChanges


class BlockStored(NamedTuple):
    """A full block can be found from now on. ``parent_hash`` is the chain's root for the first block; ``token_bytes``
    are its token ids as little-endian int32. A tuple, since a long prompt has hundreds of blocks.
    """

    block_hash: BlockHash
    parent_hash: BlockHash
    token_bytes: bytes


class BlockRemoved(NamedTuple):
    """A block can no longer be found, neither in the cache nor in a tier of evicted blocks."""

    block_hash: BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class AllCleared:
    """No block can be found any more."""


CacheEvent: TypeAlias = BlockStored | BlockRemoved | AllCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEventBatch:
    """Consecutive events: ``events[i]`` has the sequence number ``first_sequence + i``.

    A reader that expected a smaller ``first_sequence`` has missed events and must start anew.
    """

    first_sequence: int
    events: tuple[CacheEvent, ...]

    @property
    def next_sequence(self) -> int:
        """The number that the next event will have."""
        return self.first_sequence + len(self.events)


class CacheEventLog:
    """The latest events, numbered from 0 since the engine started; older ones are forgotten."""

    def __init__(self, capacity: int) -> None:
        self._events: deque[CacheEvent] = deque(maxlen=capacity)
        self._next_sequence = 0

    @property
    def next_sequence(self) -> int:
        """The number that the next event will have."""
        return self._next_sequence

    def append(self, *events: CacheEvent) -> None:
        """Record what happened, in this order."""
        self._events.extend(events)
        self._next_sequence += len(events)

    def since(self, sequence: int) -> CacheEventBatch:
        """The events from ``sequence`` on, or from the oldest one still remembered, whichever is later."""
        oldest = self._next_sequence - len(self._events)
        first = min(max(sequence, oldest), self._next_sequence)
        newest_first = tuple(islice(reversed(self._events), self._next_sequence - first))
        return CacheEventBatch(first_sequence=first, events=newest_first[::-1])


def cache_changes(batch: CacheEventBatch) -> CacheChanges:
    """A batch of events as the net changes that it makes."""
    is_stored: dict[bytes, bool] = {}
    has_cleared = False
    for event in batch.events:
        if isinstance(event, AllCleared):
            is_stored.clear()
            has_cleared = True
        else:
            is_stored[block_key(event.block_hash)] = isinstance(event, BlockStored)
    return CacheChanges(
        first_sequence=batch.first_sequence,
        next_sequence=batch.next_sequence,
        stored=b"".join([key for key, stored in is_stored.items() if stored]),
        removed=b"".join([key for key, stored in is_stored.items() if not stored]),
        is_snapshot=has_cleared,
    )


def cache_snapshot(cached: Iterable[BlockHash], *, next_sequence: int) -> CacheChanges:
    """All that is cached, after the events before ``next_sequence``."""
    stored = b"".join(map(block_key, cached))
    return CacheChanges(first_sequence=0, next_sequence=next_sequence, stored=stored, is_snapshot=True)
