"""Which attention backend serves which device."""

from __future__ import annotations

from engine.attention.backend import AttentionBackend
from engine.attention.cpu import CPUAttention
from engine.device.kv_cache import KVCache


def build_attention(cache: KVCache) -> AttentionBackend:
    """The fastest backend for the device that the cache lies on."""
    if cache.blocks.device.type == "cuda":
        from engine.attention.cuda import CUDAAttention  # imported late: CPUs have no use for it

        return CUDAAttention(cache)
    return CPUAttention(cache)
