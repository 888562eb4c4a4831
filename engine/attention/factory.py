"""Chooses the attention backend for a device."""

from __future__ import annotations

from collections.abc import Iterable

from engine.attention.backend import AttentionBackend
from engine.attention.cpu import CPUAttention
from engine.contract.errors import ConfigError
from engine.device.kv_cache import KVCache
from engine.layers.attention_spec import AttentionSpec


def check_attention(architecture: str, specs: Iterable[AttentionSpec], device_type: str) -> None:
    """Refuse a model with layers whose kind of attention no backend for the device computes.

    Raises:
        ConfigError: Names the architecture, what it needs, and the device.
    """
    if device_type != "cuda":
        return
    for spec in specs:
        missing = "capped attention scores (softcap)" if spec.softcap is not None else ""
        missing = "attention sinks" if spec.has_sinks else missing
        missing = "latent attention" if spec.value_size is not None else missing
        if missing:
            raise ConfigError(
                f"{architecture} needs {missing}, which no attention kernel for {device_type} supports",
                remedy="use device cpu",
            )


def build_attention(cache: KVCache) -> AttentionBackend:
    """The fastest backend for the device that holds the cache."""
    if cache.blocks.device.type == "cuda":
        from engine.attention.cuda import CUDAAttention  # imported late: not needed on CPUs

        return CUDAAttention(cache)
    return CPUAttention(cache)
