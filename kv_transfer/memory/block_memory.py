"""Access to the bytes of KV blocks, for checksums and injected faults."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import xxhash

from kv_transfer.errors import InvalidOptionError
from kv_transfer.layout import KVRegion, MemoryKind


class BlockChecksums(Protocol):
    """Checksums of the blocks of one region. May be called from any thread."""

    def checksums(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """The 64-bit XXH3 of each block's bytes as they are now."""


class BlockMemory(BlockChecksums, Protocol):
    """Access to the blocks of one region. May be called from any thread."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""

    def flip_bit(self, block_id: int, bit: int) -> None:
        """Damage one bit of a block."""


class HostBlockMemory:
    """Implements ``BlockMemory`` for a region in DRAM, without copying.

    Source of the hash: XXH3 by Yann Collet, which runs at the speed of memory.
    """

    def __init__(self, region: KVRegion) -> None:
        if region.memory is not MemoryKind.DRAM:
            raise InvalidOptionError(f"the bytes of blocks can be looked at in DRAM only, these lie in {region.memory}")
        self._region = region

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self._region.block_bytes

    def checksums(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """The 64-bit XXH3 of each block's bytes as they are now."""
        return tuple(xxhash.xxh3_64_intdigest(self._bytes(block_id)) for block_id in block_ids)

    def flip_bit(self, block_id: int, bit: int) -> None:
        """Damage one bit of a block."""
        self._bytes(block_id)[bit // 8] ^= 1 << bit % 8

    def _bytes(self, block_id: int) -> ctypes.Array[ctypes.c_ubyte]:
        return (ctypes.c_ubyte * self._region.block_bytes).from_address(self._region.block_address(block_id))


def open_block_memory(region: KVRegion) -> BlockMemory:
    """Access to the blocks of a region, wherever it lies."""
    if region.memory is MemoryKind.DRAM:
        return HostBlockMemory(region)
    from kv_transfer.memory.device_memory import DeviceBlockMemory  # imported late: it loads torch

    return DeviceBlockMemory(region)
