"""The memory of the paged KV cache."""

from __future__ import annotations

import torch

from engine.device.allocation import plain_memory
from engine.device.huge_pages import map_huge
from kv_transfer.layout import KEYS_AND_VALUES, KVLayout, KVRegion, MemoryKind


class KVCache:
    """All blocks of one engine, in one piece of memory.

    blocks: [num_blocks, num_kv_heads, layers_per_block, num_parts, block_size, head_dim], contiguous: a block is
        one region over all layers of its group, and each head's part of it is one range. On the CPU the memory is
        page-aligned, zeroed, and committed as it is touched.
    num_scratch_blocks: extra blocks at the end, for padding rows. Schedulers and peers do not know of them:
        ``num_blocks`` and ``region`` leave them out.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        num_scratch_blocks: int = 0,
    ) -> None:
        num_all = num_blocks + num_scratch_blocks
        layers, parts = layout.layers_per_block, layout.num_parts
        shape = (num_all, layout.num_kv_heads, layers, parts, layout.block_size, layout.head_dim)
        if device.type == "cpu":
            self.blocks = torch.frombuffer(map_huge(num_all * layout.block_bytes), dtype=dtype).view(shape)
        else:
            with plain_memory():
                self.blocks = torch.zeros(shape, dtype=dtype, device=device)
        self.layout = layout
        self.num_blocks = num_blocks

    @property
    def scratch_block(self) -> int:
        """A block that is never given to a request."""
        assert len(self.blocks) > self.num_blocks, "the cache has no scratch block"
        return self.num_blocks

    @property
    def region(self) -> KVRegion:
        """The cache's memory, for a connector to register. The cache must outlive the registration."""
        on_cpu = self.blocks.device.type == "cpu"
        return KVRegion(
            base_address=self.blocks.data_ptr(),
            num_blocks=self.num_blocks,
            block_bytes=self.layout.block_bytes,
            memory=MemoryKind.DRAM if on_cpu else MemoryKind.VRAM,
            device_index=self.blocks.device.index or 0,
        )

    def keys(self, index: int) -> torch.Tensor:
        """Keys of the ``index``-th layer of a block, [num_blocks, block_size, num_kv_heads, head_dim]: a view."""
        return self.blocks[:, :, index, 0].transpose(1, 2)

    def values(self, index: int) -> torch.Tensor:
        """Values of the ``index``-th layer of a block, laid out as ``keys``: a view. In a latent cache, the latents."""
        return self.blocks[:, :, index, -1].transpose(1, 2)

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole blocks. sources, targets: [num_copied] int64 on the cache's device; no target is also a source."""
        self.blocks.index_copy_(0, targets, self.blocks.index_select(0, sources))

    def write(
        self, index: int, places: tuple[torch.Tensor, torch.Tensor], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write keys and values, [num_tokens, num_kv_heads, head_dim], to the ``index``-th layer of blocks. ``places``
        are the block ids and the offsets in the blocks. In a latent cache only the keys are written: they hold the
        values too.
        """
        self.keys(index).index_put_(places, key)
        if self.layout.num_parts == KEYS_AND_VALUES:
            self.values(index).index_put_(places, value)
