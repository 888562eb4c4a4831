"""How KV blocks lie in memory: what two engines must agree on, and where one engine keeps them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum


class MemoryKind(StrEnum):
    """Where a KV cache lives, in NIXL's words."""

    DRAM = "DRAM"
    VRAM = "VRAM"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The shape of one block: ``[num_layers, 2 (key, value), block_size, num_kv_heads, head_dim]``, contiguous.

    Two engines may exchange blocks only if their layouts are equal, ``model_hash`` included: it identifies the
    weights, so that KV of another model is refused even where the shapes agree.
    """

    model_hash: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    bytes_per_element: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of key and value of one token over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.bytes_per_element

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.kv_bytes_per_token * self.block_size

    @property
    def layout_hash(self) -> str:
        """A short digest of every field: equal digests mean that blocks can be exchanged."""
        fields = (
            self.model_hash,
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.block_size,
            self.dtype,
            self.bytes_per_element,
        )
        return hashlib.sha256(repr(fields).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRegion:
    """The memory of one engine's whole KV cache: ``num_blocks`` blocks of ``block_bytes``, back to back.

    The owner keeps the memory alive for as long as a connector has the region registered.
    """

    base_address: int
    num_blocks: int
    block_bytes: int
    memory: MemoryKind
    device_index: int

    @property
    def total_bytes(self) -> int:
        """Bytes of the region."""
        return self.num_blocks * self.block_bytes

    def block_address(self, block_id: int) -> int:
        """Address of the first byte of a block.

        Raises:
            IndexError: There is no such block: the bytes there belong to something else, or to nothing.
        """
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} is not among the {self.num_blocks} of the region")
        return self.base_address + block_id * self.block_bytes


def host_region(address: int, *, num_slots: int, block_bytes: int) -> KVRegion:
    """A region of slots in host memory."""
    return KVRegion(
        base_address=address, num_blocks=num_slots, block_bytes=block_bytes, memory=MemoryKind.DRAM, device_index=0
    )
