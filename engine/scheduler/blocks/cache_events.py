"""What changed in the prefix cache, in order, so that a router can mirror the index."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from engine.contract.block_hash import BlockHash, block_key
from engine.contract.messages import CacheChanges


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """A full block can be found from now on. ``parent_hash`` is the chain's root for the first block."""

    block_hash: BlockHash
    parent_hash: BlockHash
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """A block can no longer be found: not in the cache, and not where evicted blocks are kept."""

    block_hash: BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class AllCleared:
    """No block can be found any more."""


CacheEvent: TypeAlias = BlockStored | BlockRemoved | AllCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEventBatch:
    """Consecutive events: ``events[i]`` has the sequence number ``first_sequence + i``.

    A reader that expected a smaller ``first_sequence`` has missed events and starts afresh.
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

    def append(self, event: CacheEvent) -> None:
        """Record what happened."""
        self._events.append(event)
        self._next_sequence += 1

    def since(self, sequence: int) -> CacheEventBatch:
        """The events from ``sequence`` on, or from the oldest one still remembered, whichever is later."""
        oldest = self._next_sequence - len(self._events)
        first = min(max(sequence, oldest), self._next_sequence)
        return CacheEventBatch(first_sequence=first, events=tuple(islice(self._events, first - oldest, None)))


def cache_changes(batch: CacheEventBatch) -> CacheChanges:
    """What a batch of events comes to."""
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
