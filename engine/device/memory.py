"""How many KV blocks fit: the arithmetic, and the memory measurements behind it."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from engine.contract.config import CacheConfig
from engine.contract.errors import ConfigError
from kv_transfer.layout import KVLayout

MIB = 1 << 20
DEFAULT_CPU_BYTES = 1 << 30
MAX_CPU_SHARE = 0.4
"""Largest share of the available memory that a cache takes on a CPU when no size is configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDemand:
    """What the cache must hold: up to ``max_num_seqs`` sequences of ``max_model_len`` tokens at once.

    ``chunk_tokens``: most tokens of one sequence that a step computes.
    """

    layout: KVLayout
    max_model_len: int
    max_num_seqs: int
    chunk_tokens: int = 1

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks that the longest sequence holds at once; for a group with a sliding window, only those in the
        window.
        """
        return self.layout.cache_groups.num_blocks_at_once(self.max_model_len, chunk_tokens=self.chunk_tokens)

    def max_tokens(self, num_blocks: int) -> int | None:
        """Tokens of the longest sequence that fits in ``num_blocks`` blocks; None: any length fits."""
        return self.layout.cache_groups.max_tokens(num_blocks, chunk_tokens=self.chunk_tokens)

    @property
    def max_useful_blocks(self) -> int:
        """Blocks with which every sequence could reach its full length at once; more would never be used."""
        return self.blocks_per_sequence * self.max_num_seqs

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of KV of the longest sequence."""
        return self.blocks_per_sequence * self.layout.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes that the cache may take, and a sentence that says where the number comes from."""

    num_bytes: int
    reason: str


def cpu_budget(cache: CacheConfig, demand: CacheDemand, *, available_bytes: int | None = None) -> MemoryBudget:
    """What the cache may take on the CPU: the configured bytes, else 1 GiB or one full sequence, whichever is more, but
    at most 40 % of the available memory.
    """
    if cache.kv_cache_bytes is not None:
        return MemoryBudget(num_bytes=cache.kv_cache_bytes, reason=f"kv_cache_bytes = {cache.kv_cache_bytes}")
    available = psutil.virtual_memory().available if available_bytes is None else available_bytes
    limit = int(available * MAX_CPU_SHARE)
    wanted = max(DEFAULT_CPU_BYTES, demand.bytes_per_sequence)
    if limit < wanted:
        return MemoryBudget(num_bytes=limit, reason=f"{MAX_CPU_SHARE:.0%} of {mib(available)} available memory")
    is_default = wanted == DEFAULT_CPU_BYTES
    return MemoryBudget(
        num_bytes=wanted, reason="the default on a CPU" if is_default else "one sequence of max_model_len"
    )


GPU_CONTEXT_BYTES = 600 << 20
"""About what a CUDA context with its libraries takes of a GPU, on top of the memory that torch allocates."""


def gpu_budget(
    cache: CacheConfig,
    *,
    total_bytes: int,
    used_bytes: int,
    peak_step_bytes: int,
    graph_bytes: int = 0,
    free_bytes: int | None = None,
) -> MemoryBudget:
    """What the cache may take on a GPU: the engine's share of the device, less what the engine uses already, a step's
    peak, and the decode graphs; at most what is free, if that is known.

    Other engines on the same GPU have shares of their own, so what they use does not count against this one's share.
    """
    if cache.kv_cache_bytes is not None:
        return MemoryBudget(num_bytes=cache.kv_cache_bytes, reason=f"kv_cache_bytes = {cache.kv_cache_bytes}")
    share = int(total_bytes * cache.gpu_memory_utilization)
    room = share - used_bytes
    reason = f"gpu_memory_utilization {cache.gpu_memory_utilization:g} of {mib(total_bytes)} = {mib(share)}, less "
    reason += f"{mib(used_bytes)} in use and "
    if free_bytes is not None and free_bytes < room:
        room = free_bytes
        reason = f"{mib(free_bytes)} free of {mib(total_bytes)}, which other processes use as well, less "
    return MemoryBudget(
        num_bytes=max(room - peak_step_bytes - graph_bytes, 0),
        reason=reason
        + f"{mib(peak_step_bytes)} for a step"
        + (f" and {mib(graph_bytes)} for decode graphs" if graph_bytes else ""),
    )


def size_reason(cache: CacheConfig, demand: CacheDemand, budget: MemoryBudget | None) -> str:
    """Why ``choose_num_blocks`` gives a cache its size, as text for people; empty if unknown."""
    if cache.num_blocks is not None:
        return f"num_blocks = {cache.num_blocks}"
    if budget is None:
        return ""
    if budget.num_bytes // demand.layout.block_bytes > demand.max_useful_blocks:
        return f"all that max_num_seqs = {demand.max_num_seqs} sequences of max_model_len can use"
    return budget.reason


def choose_num_blocks(cache: CacheConfig, demand: CacheDemand, budget: MemoryBudget) -> int:
    """How many blocks to allocate: as many as fit, but no more than could ever be used at once.

    Raises:
        ConfigError: One sequence of ``max_model_len`` would not fit; the message holds the arithmetic.
    """
    if cache.num_blocks is not None:
        num_blocks = cache.num_blocks
        reason = f"num_blocks = {num_blocks}"
    else:
        num_blocks = min(budget.num_bytes // demand.layout.block_bytes, demand.max_useful_blocks)
        reason = f"{mib(budget.num_bytes)} ({budget.reason})"
    if num_blocks >= demand.blocks_per_sequence:
        return num_blocks
    layout = demand.layout
    max_tokens = demand.max_tokens(num_blocks)
    shorter = f"lower max_model_len to {max_tokens} or " if max_tokens else ""
    bytes_per_token = layout.block_bytes // layout.block_size
    raise ConfigError(
        f"the KV cache is too small for one request of max_model_len {demand.max_model_len}: that takes "
        f"{demand.blocks_per_sequence} blocks of {layout.block_size} tokens x {bytes_per_token} bytes = "
        f"{mib(demand.bytes_per_sequence)}, but {reason} gives {num_blocks} blocks = "
        f"{mib(num_blocks * layout.block_bytes)}",
        remedy=f"{shorter}give the cache more memory",
    )


def mib(num_bytes: int) -> str:
    """Bytes as MiB, as text for people."""
    return f"{num_bytes / MIB:.1f} MiB"
