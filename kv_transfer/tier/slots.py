"""The table of a tier's slots and their content: fixed size, least recently used content is evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The slot for some content. ``is_new``: the content must be copied there. ``evicted``: the slot's old content."""

    slot: int
    is_new: bool
    evicted: bytes | None = None


class SlotTable:
    """A fixed number of slots. Owned by the engine's thread; moves no bytes.

    A *pinned* slot is being read, or is about to be: it is not given to other content. Content is ordered by last use.
    The head of a chain counts as used later than its tail, so the tail is evicted first.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_evicted = 0
        self._slot_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * num_slots
        self._num_pins = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._unpinned: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slot_of

    @property
    def has_room(self) -> bool:
        """True while a slot is free, or its content may be evicted."""
        return bool(self._free or self._unpinned)

    def slot_of(self, block_hash: bytes) -> int:
        """The slot of kept content."""
        return self._slot_of[block_hash]

    def place(self, block_hash: bytes) -> Placed | None:
        """Find a slot for content, and mark the content as used now; None when every slot is pinned."""
        slot = self._slot_of.get(block_hash)
        if slot is not None:
            if not self._num_pins[slot]:
                self._unpinned.move_to_end(slot)
            return Placed(slot=slot, is_new=False)
        evicted = None
        if self._free:
            slot = self._free.pop()
        elif self._unpinned:
            slot, _ = self._unpinned.popitem(last=False)
            evicted = self._hash_of[slot]
            assert evicted is not None, f"slot {slot} is neither free nor used"
            del self._slot_of[evicted]
            self.num_evicted += 1
        else:
            return None
        self._slot_of[block_hash] = slot
        self._hash_of[slot] = block_hash
        self._unpinned[slot] = None
        return Placed(slot=slot, is_new=True, evicted=evicted)

    def pin(self, slots: Sequence[int]) -> None:
        """Keep these slots as they are until ``unpin``; pins add up."""
        for slot in slots:
            if not self._num_pins[slot]:
                del self._unpinned[slot]
            self._num_pins[slot] += 1

    def unpin(self, slots: Sequence[int]) -> list[int]:
        """Unpin a chain's slots, and mark them as used now. Returns the free ones: their content was forgotten."""
        emptied = []
        for slot in reversed(slots):
            self._num_pins[slot] -= 1
            assert self._num_pins[slot] >= 0, f"slot {slot} was unpinned twice"
            if self._num_pins[slot]:
                continue
            if self._hash_of[slot] is None:
                self._free.append(slot)
                emptied.append(slot)
            else:
                self._unpinned[slot] = None
        return emptied

    def forget(self, slot: int, block_hash: bytes) -> bool:
        """Forget content if it is in this slot. A pinned slot becomes free when it is unpinned."""
        if self._hash_of[slot] != block_hash:
            return False
        del self._slot_of[block_hash]
        self._hash_of[slot] = None
        if slot in self._unpinned:
            del self._unpinned[slot]
            self._free.append(slot)
        return True

    def clear(self) -> list[int]:
        """Forget all content. Returns the slots that are free now; pinned slots become free when they are unpinned."""
        for slot in self._slot_of.values():
            self._hash_of[slot] = None
        self._slot_of.clear()
        emptied = list(self._unpinned)
        self._free.extend(emptied)
        self._unpinned.clear()
        return emptied

    def check_integrity(self, expected_pins: Sequence[int]) -> None:
        """Compare with the pins that the callers hold.

        Raises:
            AssertionError: A slot leaked, or is in two places.
        """
        assert list(expected_pins) == self._num_pins, f"pins {self._num_pins}, expected {expected_pins}"
        pinned = {slot for slot, num_pins in enumerate(self._num_pins) if num_pins}
        places = [*self._free, *self._unpinned, *pinned]
        assert sorted(places) == list(range(self.num_slots)), "free, kept and pinned slots are not all slots"
        kept = {slot for slot, block_hash in enumerate(self._hash_of) if block_hash is not None}
        assert kept == set(self._slot_of.values()), "the two directions of the index disagree"
        assert kept >= set(self._unpinned), "a slot without content can be evicted"
        assert not kept & set(self._free), "a slot with content is free"
