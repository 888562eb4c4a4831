"""A tier's storage that moves nothing, for tests of decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kv_transfer.connector import StoreOrder
from kv_transfer.inproc import InProcessRead
from kv_transfer.memory.block_memory import BlockChecksums
from kv_transfer.tier.storage import LostSlot
from kv_transfer.transport import Read


class ListedStorage:
    """Implements ``TierStorage``: records its orders. ``num_ways`` limits the blocks in flight."""

    def __init__(self, num_slots: int, *, kept: Sequence[bytes] = (), num_ways: int | None = None) -> None:
        self.num_slots = num_slots
        self.on_event: Callable[[], None] | None = None
        self.arrived: BlockChecksums | None = None
        self.kept = kept
        self.num_ways = num_ways
        self.lost: list[LostSlot] = []

    def reserve(self) -> bool:
        """Take one of the ways, if they are limited."""
        if self.num_ways is None:
            return True
        if not self.num_ways:
            return False
        self.num_ways -= 1
        return True

    def store(self, order: StoreOrder) -> None:
        """Move nothing."""

    def checksums(self, slots: Sequence[int]) -> tuple[int, ...] | None:
        """None."""
        return None

    def start_read(self, slots: Sequence[int], block_ids: Sequence[int]) -> Read:
        """Move nothing."""
        return InProcessRead()

    def take_lost(self) -> Sequence[LostSlot]:
        """The lost slots that the test set, once."""
        lost, self.lost = self.lost, []
        return lost

    def counters(self) -> Mapping[str, int]:
        """None."""
        return {}

    def close(self) -> None:
        """Nothing runs."""
