"""The seam below a tier: where its slots lie, and who moves blocks to and from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.connector import StoreOrder
from kv_transfer.memory.block_memory import BlockChecksums
from kv_transfer.transport import Read


@dataclass(frozen=True, slots=True, kw_only=True)
class LostSlot:
    """Content that a storage took and does not have, or has damaged."""

    slot: int
    block_hash: bytes


class TierStorage(Protocol):
    """``num_slots`` places for one block each.

    All calls but ``start_read`` and ``close`` come from the engine's thread, and wait for no device but the engine's
    own. Reads are started by the thread that loads. The end of one that is not over when ``start_read`` returns is
    announced by calling ``on_event``, from any thread.
    """

    num_slots: int
    on_event: Callable[[], None] | None
    arrived: BlockChecksums | None
    """What was read into which block, for a KV cache whose own bytes are not looked at; None where nothing can be."""

    @property
    def kept(self) -> Sequence[bytes]:
        """The addresses of what lay in slots 0, 1, ... when this storage was opened, least recently used first."""

    def reserve(self) -> bool:
        """Make sure of the way for one more block; False when there is none now. Each success is used by a store."""

    def store(self, order: StoreOrder) -> None:
        """Empty slots and fill others; when this returns the blocks may be written again."""

    def checksums(self, slots: Sequence[int]) -> tuple[int, ...] | None:
        """The 64-bit XXH3 of what was stored in each slot; None where nobody is to compare them."""

    def start_read(self, slots: Sequence[int], block_ids: Sequence[int]) -> Read:
        """Begin to copy slots into blocks, pairwise. What cannot be read leaves its block with another checksum."""

    def take_lost(self) -> Sequence[LostSlot]:
        """What turned out to be lost since the last call."""

    def counters(self) -> Mapping[str, int]:
        """What only this storage counts, under names of ``TransferStats``."""

    def close(self) -> None:
        """Write no block any more. Idempotent; called from the thread that loads."""
