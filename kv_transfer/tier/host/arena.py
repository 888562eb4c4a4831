"""The memory of the host tier, and the copies between it and the blocks of an engine."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Protocol

from kv_transfer.errors import InvalidOptionError
from kv_transfer.layout import KVRegion, MemoryKind, host_region


class HostArena(Protocol):
    """The host tier's memory and its copies. ``region`` has one block per slot, and is freed with this object.

    Every copy is over when its call returns.
    """

    region: KVRegion

    def store(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks into slots, pairwise, in order."""

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy slots into blocks, pairwise. One thread at a time may call this, also while ``store`` runs."""


class DramArena:
    """An arena for a KV cache in host memory. Its pages are committed when they are first used."""

    def __init__(self, blocks: KVRegion, *, num_slots: int) -> None:
        self._blocks = blocks
        self._memory = mmap.mmap(-1, num_slots * blocks.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.region = host_region(address, num_slots=num_slots, block_bytes=blocks.block_bytes)

    def store(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks into slots."""
        address, slot_address, num_bytes = (
            self._blocks.block_address,
            self.region.block_address,
            self._blocks.block_bytes,
        )
        for block_id, slot in zip(block_ids, slots, strict=True):
            ctypes.memmove(slot_address(slot), address(block_id), num_bytes)

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy slots into blocks."""
        address, slot_address, num_bytes = (
            self._blocks.block_address,
            self.region.block_address,
            self._blocks.block_bytes,
        )
        for slot, block_id in zip(slots, block_ids, strict=True):
            ctypes.memmove(address(block_id), slot_address(slot), num_bytes)


def build_arena(blocks: KVRegion, *, host_bytes: int) -> HostArena:
    """An arena for as many blocks as fit into ``host_bytes``.

    Raises:
        InvalidOptionError: The size is below one block, or above this machine's memory.
    """
    num_slots = host_bytes // blocks.block_bytes
    if num_slots < 1:
        raise InvalidOptionError(
            f"host_bytes: {host_bytes} is less than the {blocks.block_bytes} bytes of one KV block"
        )
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if host_bytes > total_bytes:
        raise InvalidOptionError(f"host_bytes: {host_bytes} is more than the {total_bytes} bytes of this machine")
    if blocks.memory is MemoryKind.VRAM:
        from kv_transfer.tier.host.pinned import PinnedArena  # imported late: it loads torch

        return PinnedArena(blocks, num_slots=num_slots)
    return DramArena(blocks, num_slots=num_slots)
