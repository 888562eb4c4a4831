"""The memory of the paged KV cache."""

from __future__ import annotations

import contextlib
import mmap

import torch

from kv_transfer.layout import KVLayout, KVRegion, MemoryKind


class KVCache:
    """All blocks of one engine, in one piece.

    blocks: [num_blocks, num_layers, 2 (key, value), block_size, num_kv_heads, head_dim], contiguous: a block is one
        region over all layers. On the CPU the memory is page-aligned, zeroed, and committed as it is touched.
    """

    def __init__(self, layout: KVLayout, *, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (num_blocks, layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)
        if device.type == "cpu":
            self.blocks = torch.frombuffer(_allocate(num_blocks * layout.block_bytes), dtype=dtype).view(shape)
        else:
            self.blocks = torch.zeros(shape, dtype=dtype, device=device)
        self.layout = layout
        self.num_blocks = num_blocks

    @property
    def region(self) -> KVRegion:
        """Where the cache lies, for a connector. The cache must outlive the registration."""
        on_cpu = self.blocks.device.type == "cpu"
        return KVRegion(
            base_address=self.blocks.data_ptr(),
            num_blocks=self.num_blocks,
            block_bytes=self.layout.block_bytes,
            memory=MemoryKind.DRAM if on_cpu else MemoryKind.VRAM,
            device_index=self.blocks.device.index or 0,
        )

    def slot_rows(self) -> torch.Tensor:
        """The cache as rows, [num_blocks * num_layers * 2 * block_size, num_kv_heads, head_dim]: the same memory."""
        return self.blocks.view(-1, self.layout.num_kv_heads, self.layout.head_dim)

    def read_block(self, block_id: int) -> bytes:
        """A copy of a block's bytes."""
        return self.blocks[block_id].cpu().view(torch.uint8).numpy().tobytes()

    def write_block(self, block_id: int, content: bytes) -> None:
        """Overwrite a block.

        Raises:
            ValueError: ``content`` is not exactly one block long.
        """
        if len(content) != self.layout.block_bytes:
            raise ValueError(f"a block has {self.layout.block_bytes} bytes, got {len(content)}")
        block = self.blocks[block_id]
        block.copy_(torch.frombuffer(bytearray(content), dtype=block.dtype).view(block.shape))


def _allocate(num_bytes: int) -> mmap.mmap:
    """Zeroed memory in huge pages where the system has them: blocks lie scattered, and small pages cost attention a
    tenth of its speed in address translation.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
