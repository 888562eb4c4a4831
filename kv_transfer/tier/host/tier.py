"""The host tier: its settings, and its storage in main memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kv_transfer.connector import StoreOrder
from kv_transfer.inproc import InProcessRead
from kv_transfer.layout import KVLayout, KVRegion
from kv_transfer.memory.block_memory import BlockChecksums, BlockMemory, open_block_memory
from kv_transfer.tier.host.arena import HostArena, build_arena
from kv_transfer.tier.options import TierOptions
from kv_transfer.tier.storage import LostSlot
from kv_transfer.transport import Read


@dataclass(frozen=True, kw_only=True)
class HostTierOptions(TierOptions):
    """The settings of the host tier."""

    host_bytes: int = field(
        default=0,
        metadata={
            "description": "Main memory in bytes that each worker's host tier may use; it is allocated as the tier "
            "fills."
        },
    )

    def main_memory_bytes(self) -> int:
        """All of its memory."""
        return self.host_bytes


class HostStorage:
    """Implements ``TierStorage``: a slot is a block of an arena, and every copy is over when its call returns.

    With ``memory``, which reads the arena's bytes, every copy has a checksum. Copy and checksum cost less than 1 % of
    computing a block (benchmarks/host_tier.py).
    """

    def __init__(self, arena: HostArena, *, memory: BlockMemory | None = None) -> None:
        self.arena = arena
        self.num_slots = arena.region.num_blocks
        self.arrived: BlockChecksums | None = None
        self.on_event: Callable[[], None] | None = None
        self._memory = memory
        self._checksums = [0] * self.num_slots

    @property
    def kept(self) -> Sequence[bytes]:
        """Nothing: main memory does not outlive its process."""
        return ()

    def reserve(self) -> bool:
        """Always True: a copy is over at once."""
        return True

    def store(self, order: StoreOrder) -> None:
        """Copy blocks into slots. Emptied slots need no work."""
        self.arena.store(order.block_ids, order.slots)
        if self._memory is not None:
            for slot, checksum in zip(order.slots, self._memory.checksums(order.slots), strict=True):
                self._checksums[slot] = checksum

    def checksums(self, slots: Sequence[int]) -> tuple[int, ...] | None:
        """The checksums of the copies; None if none are computed."""
        return None if self._memory is None else tuple(self._checksums[slot] for slot in slots)

    def start_read(self, slots: Sequence[int], block_ids: Sequence[int]) -> Read:
        """Copy now, in this thread."""
        self.arena.load(slots, block_ids)
        return InProcessRead()

    def take_lost(self) -> Sequence[LostSlot]:
        """Nothing is ever lost."""
        return ()

    def counters(self) -> Mapping[str, int]:
        """None of its own."""
        return {}

    def close(self) -> None:
        """Nothing runs."""


def open_host_storage(
    options: HostTierOptions,
    *,
    layout: KVLayout,  # noqa: ARG001  (storages that outlive their process need it)
    region: KVRegion,
    has_checksums: bool,
) -> HostStorage:
    """A storage for as many blocks as fit into ``host_bytes`` of main memory.

    Raises:
        InvalidOptionError: The size is below one block, or above this machine's memory.
    """
    arena = build_arena(region, host_bytes=options.host_bytes)
    return HostStorage(arena, memory=open_block_memory(arena.region) if has_checksums else None)
