"""Mirrors which blocks each replica has in its prefix cache, as workers report: a hint for routing, not a promise."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.contract.block_hash import unpack_keys
from engine.contract.messages import CacheChanges

logger = logging.getLogger(f"baton.{__name__}")

MAX_LEVELS = 16
"""Resolution of a look-up: a sixteenth of the prompt. A finer one would cost more than it is worth."""


@dataclass(slots=True)
class _Mirrored:
    """One replica: its bit in the masks, its keys, and the number of the next change."""

    slot: int
    keys: set[int] = field(default_factory=set)
    next_sequence: int | None = None


class PrefixMirror:
    """The prefix caches of a pool's replicas, by block.

    One table maps a block's key to a bit mask of the replicas that have it, so a look-up costs the same for one replica
    and for hundreds. It holds at most ``max_blocks`` (a block counts once for each replica). Beyond that new blocks are
    ignored until others are evicted, so prompts seem to be cached less than they are.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._holders: dict[int, int] = {}
        self._replicas: dict[str, _Mirrored] = {}
        self._names: dict[int, str] = {}
        self.num_blocks = 0
        self.num_dropped = 0

    def apply(self, replica_id: str, changes: CacheChanges) -> bool:
        """Apply changes; False if earlier ones are missing, so that the caller must ask for a snapshot."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            replica = self._add(replica_id)
        if changes.is_snapshot:
            if replica.next_sequence is not None and changes.next_sequence < replica.next_sequence:
                return True
            self._clear(replica)
        elif replica.next_sequence is None or changes.first_sequence > replica.next_sequence:
            self._clear(replica)
            replica.next_sequence = None
            return False
        elif changes.next_sequence <= replica.next_sequence:
            return True
        self._remove(replica, unpack_keys(changes.removed))
        self._store(replica, unpack_keys(changes.stored))
        replica.next_sequence = changes.next_sequence
        return True

    def forget(self, replica_id: str) -> None:
        """Forget a replica that is gone, or that has a new incarnation."""
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            self._clear(replica)
            del self._names[replica.slot]

    def cached_tokens(self, keys: Sequence[int], block_size: int) -> Mapping[str, int]:
        """How many leading tokens of a prompt each replica has, roughly; replicas with none are left out.

        Engines evict the tail of a chain before its head, so a replica that has a block has those before it. A long
        prompt is probed at ``MAX_LEVELS`` positions, and counted up to the last one that a replica has.
        """
        counts: dict[str, int] = {}
        find = self._holders.get
        below = find(keys[0], 0) if keys else 0
        if not below:
            return counts
        num_levels = min(len(keys), MAX_LEVELS)
        num_blocks = 1
        for level in range(1, num_levels + 1):
            end = len(keys) * level // num_levels
            here = find(keys[end - 1], 0)
            if ending := below & ~here:
                counts.update(dict.fromkeys(self._named(ending), num_blocks * block_size))
            below, num_blocks = here, end
            if not here:
                return counts
        counts.update(dict.fromkeys(self._named(below), num_blocks * block_size))
        return counts

    def num_cached(self, replica_id: str, keys: Sequence[int]) -> int:
        """How many leading blocks of a prompt one replica has, exactly."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return 0
        own = replica.keys
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in own:
                low = middle + 1
            else:
                high = middle
        return low

    def _named(self, mask: int) -> list[str]:
        """The replicas in a mask: bit by bit if they are few, otherwise from the mask's digits."""
        names = self._names
        if mask.bit_count() > 32:
            return [names[slot] for slot, digit in enumerate(reversed(f"{mask:b}")) if digit == "1"]
        named: list[str] = []
        while mask:
            slot = mask.bit_length() - 1
            named.append(names[slot])
            mask ^= 1 << slot
        return named

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
