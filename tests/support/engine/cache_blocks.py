"""Bytes of single blocks of a KV cache, to compare and to damage."""

from __future__ import annotations

import torch

from engine.device.kv_cache import KVCache


def read_block(cache: KVCache, block_id: int) -> bytes:
    """A copy of a block's bytes."""
    return cache.blocks[block_id].cpu().view(torch.uint8).numpy().tobytes()


def write_block(cache: KVCache, block_id: int, content: bytes) -> None:
    """Overwrite a block, with exactly as many bytes as it has."""
    assert len(content) == cache.layout.block_bytes
    block = cache.blocks[block_id]
    block.copy_(torch.frombuffer(bytearray(content), dtype=block.dtype).view(block.shape))
