"""Which replica has which blocks in its prefix cache, as the workers' news tell: a hint for the choice, no promise."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.block_hash import unpack_keys
from engine.messages import CacheNews

logger = logging.getLogger(f"baton.{__name__}")


@dataclass(slots=True)
class _Mirrored:
    """One replica: its bit in the masks, the keys it has, and the number of the next change."""

    slot: int
    keys: set[int] = field(default_factory=set)
    next_sequence: int | None = None


class PrefixMirror:
    """The prefix caches of one role's replicas, by block.

    One table for all replicas, from a block's key to a mask of those that have it: a look-up costs the same for one
    replica and for hundreds. At most ``max_blocks`` (a block counts once for each replica) are remembered; past that
    new ones are not, until others were evicted, and prompts seem to be cached less than they are.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._holders: dict[int, int] = {}
        self._replicas: dict[str, _Mirrored] = {}
        self._names: dict[int, str] = {}
        self.num_blocks = 0
        self.num_dropped = 0

    def apply(self, replica_id: str, news: CacheNews) -> bool:
        """Take news in; False when some before them are missing, so that a snapshot has to be asked for."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            replica = self._add(replica_id)
        if news.is_snapshot:
            if replica.next_sequence is not None and news.next_sequence < replica.next_sequence:
                return True
            self._clear(replica)
        elif replica.next_sequence is None or news.first_sequence > replica.next_sequence:
            self._clear(replica)
            replica.next_sequence = None
            return False
        elif news.next_sequence <= replica.next_sequence:
            return True
        self._remove(replica, unpack_keys(news.removed))
        self._store(replica, unpack_keys(news.stored))
        replica.next_sequence = news.next_sequence
        return True

    def forget(self, replica_id: str) -> None:
        """The replica is gone, or lives another life: nothing is known of it."""
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            self._clear(replica)
            del self._names[replica.slot]

    def num_cached(self, keys: Sequence[int]) -> Mapping[str, int]:
        """How many leading blocks of a prompt each replica has; those with none are left out.

        Engines evict the tail of a chain before its head, so whoever has a block has those before it. The ends are
        therefore found by bisection: a few look-ups for each different length, however long the prompt.
        """
        counts: dict[str, int] = {}
        first = self._holders.get(keys[0], 0) if keys else 0
        if first:
            self._bisect(keys, 0, len(keys), first, 0, counts)
        return counts

    def _bisect(
        self, keys: Sequence[int], low: int, high: int, at_low: int, at_high: int, counts: dict[str, int]
    ) -> None:
        """Count for the replicas that have block ``low`` and not block ``high``."""
        ending = at_low & ~at_high
        while ending:
            if high - low == 1:
                for name in self._named(ending):
                    counts[name] = high
                return
            middle = (low + high) // 2
            at_middle = self._holders.get(keys[middle], 0) & at_low
            self._bisect(keys, middle, high, at_middle, at_high, counts)
            high, at_high = middle, at_middle
            ending = at_low & ~at_high

    def _named(self, mask: int) -> list[str]:
        names: list[str] = []
        while mask:
            slot = mask.bit_length() - 1
            names.append(self._names[slot])
            mask ^= 1 << slot
        return names

    def _add(self, replica_id: str) -> _Mirrored:
        slot = next(number for number in range(len(self._names) + 1) if number not in self._names)
        self._names[slot] = replica_id
        replica = self._replicas[replica_id] = _Mirrored(slot)
        return replica

    def _store(self, replica: _Mirrored, keys: Sequence[int]) -> None:
        holders, own, bit = self._holders, replica.keys, 1 << replica.slot
        for key in keys:
            if key in own:
                continue
            if self.num_blocks >= self._max_blocks:
                self._note_full()
                return
            own.add(key)
            holders[key] = holders.get(key, 0) | bit
            self.num_blocks += 1

    def _remove(self, replica: _Mirrored, keys: Sequence[int]) -> None:
        holders, own, bit = self._holders, replica.keys, 1 << replica.slot
        for key in keys:
            if key not in own:
                continue
            own.discard(key)
            self.num_blocks -= 1
            left = holders[key] ^ bit
            if left:
                holders[key] = left
            else:
                del holders[key]

    def _clear(self, replica: _Mirrored) -> None:
        self._remove(replica, tuple(replica.keys))

    def _note_full(self) -> None:
        if self.num_dropped == 0:
            logger.warning("the mirror of the prefix caches is full: max_mirrored_blocks=%d", self._max_blocks)
        self.num_dropped += 1
