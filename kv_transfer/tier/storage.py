"""The interface below a tier: a storage holds the slots, and moves blocks to and from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.connector import StoreOrder
from kv_transfer.memory.block_memory import BlockChecksums
from kv_transfer.transport import Read


@dataclass(frozen=True, slots=True, kw_only=True)
class LostSlot:
    """A slot whose content the storage accepted, but lost or found damaged."""

    slot: int
    block_hash: bytes


class TierStorage(Protocol):
    """``num_slots`` slots for one block each.

    The engine's thread makes all calls except ``start_read`` and ``close``; these calls wait for no device but the
    engine's own. The loading thread starts reads. If a read is not over when ``start_read`` returns, the storage
    calls ``on_event``, from any thread, when it ends.
    """

    num_slots: int
    on_event: Callable[[], None] | None
    arrived: BlockChecksums | None
    """The checksums of what was read into each block, for KV caches whose own bytes are not checked; None: unknown."""

    @property
    def kept(self) -> Sequence[bytes]:
        """The block hashes in slots 0, 1, ... when this storage was opened, least recently used first."""

    def reserve(self) -> bool:
        """Reserve buffer space for one more block; False when there is none now. A ``store`` follows each success."""

    def store(self, order: StoreOrder) -> None:
        """Empty some slots and fill others. When this returns, the stored blocks may be reused."""

    def checksums(self, slots: Sequence[int]) -> tuple[int, ...] | None:
        """The 64-bit XXH3 of what was stored in each slot; None when checksums are not verified."""

    def start_read(self, slots: Sequence[int], block_ids: Sequence[int]) -> Read:
        """Begin to copy slots into blocks, pairwise. If a slot cannot be read, its block has a wrong checksum."""

    def take_lost(self) -> Sequence[LostSlot]:
        """The slots whose content was found to be lost since the last call."""

    def counters(self) -> Mapping[str, int]:
        """What this storage counts besides what every tier does, such as ``lost_blocks``."""

    def close(self) -> None:
        """Stop writing blocks of the KV cache. Idempotent; called from the thread that loads."""
