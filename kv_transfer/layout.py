"""How KV blocks lie in memory: what two engines must agree on, and where one engine keeps them."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kv_transfer.cache_groups import CacheGroups


class MemoryKind(StrEnum):
    """Where a KV cache lives, in NIXL's words."""

    DRAM = "DRAM"
    VRAM = "VRAM"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroup:
    """Layers of a model whose KV shares blocks, because they all see the same window.

    layers: the numbers of these layers in the model. window: how many tokens a position sees, itself included. None:
    it sees all earlier tokens.
    """

    layers: tuple[int, ...]
    window: int | None


def group_layers(windows: Sequence[int | None]) -> tuple[KVCacheGroup, ...]:
    """Divide a model's layers, each with its window, into KV cache groups that share one pool of equal blocks.

    If all layers have the same window, they make one group. Otherwise no group has more layers than the rarest window.
    For example, 28 layers of which 24 have a window make 1 group of 4 layers without a window and 6 groups of 4 layers
    with it. Groups without a window come first, then groups from the widest window to the narrowest.

    Source: the hybrid KV cache manager of vLLM.
    """
    counts = Counter(windows)
    size = min(counts.values())
    groups: list[KVCacheGroup] = []
    for window in sorted(counts, key=lambda window: -window if window is not None else -math.inf):
        layers = [layer for layer, other in enumerate(windows) if other == window]
        groups += [
            KVCacheGroup(layers=tuple(layers[start : start + size]), window=window)
            for start in range(0, len(layers), size)
        ]
    return tuple(groups)


KEYS_AND_VALUES: Final = 2
LATENTS: Final = 1
"""Number of parts of a layer's KV. One part where the values are columns of the keys (``AttentionSpec.value_size``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The shape of one block: ``[num_kv_heads, layers_per_block, num_parts, block_size, head_dim]``, contiguous.

    num_parts: ``KEYS_AND_VALUES`` (keys first), or ``LATENTS``, which serve as both.

    Heads come first, so that the heads of one rank are one contiguous range. A block holds the KV of ``block_size``
    tokens for the layers of one group. All blocks have the same size, and any block may serve any group. A group with
    fewer layers than the others leaves the rest of each block unused.

    Two engines may exchange blocks only if their layouts are equal, ``model_hash`` included: it identifies the
    weights, so that KV of another model is refused even where the shapes agree.
    """

    model_hash: str
    groups: tuple[KVCacheGroup, ...]
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    bytes_per_element: int
    num_parts: int = KEYS_AND_VALUES

    @property
    def num_groups(self) -> int:
        """KV cache groups: how many block tables a request has."""
        return len(self.groups)

    @property
    def cache_groups(self) -> CacheGroups:
        """Which blocks of each group a position needs."""
        return CacheGroups(tuple(group.window for group in self.groups), self.block_size)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return sum(len(group.layers) for group in self.groups)

    @property
    def layers_per_block(self) -> int:
        """Number of layers that a block has room for: as many as the largest group has."""
        return max(len(group.layers) for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        num_vectors = self.num_kv_heads * self.layers_per_block * self.num_parts * self.block_size
        return num_vectors * self.head_dim * self.bytes_per_element

    @property
    def layout_hash(self) -> str:
        """A short digest of every field: equal digests mean that blocks can be exchanged."""
        *fields, num_parts = dataclasses.astuple(self)
        if num_parts != KEYS_AND_VALUES:  # left out otherwise, so that digests from before this field stay the same
            fields.append(num_parts)
        return hashlib.sha256(repr(tuple(fields)).encode()).hexdigest()[:16]


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
