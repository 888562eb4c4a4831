"""Remedies for an engine whose settings do not fit its memory, or do not fit each other given its KV cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

from cluster.config.config import BatonConfig
from cluster.plan.change import Change, Key
from cluster.plan.place_remedies import fewer
from cluster.plan.placement import first_replicas
from cluster.plan.sizing import EngineRoom, size_engine
from engine.contract.config import CacheConfig
from engine.contract.errors import ConfigError
from engine.device.memory import MAX_CPU_SHARE as CPU_CACHE_SHARE
from engine.device.memory import MIB

MAX_UTILIZATION = 0.95
"""Largest share of a GPU's memory to suggest: the rest is for memory that the arithmetic does not count."""

MAX_CPU_SHARE = 0.8
"""Largest share of an engine's part of the host's memory that is suggested for its KV cache."""

PLENTY = 1 << 20


def memory_changes(pool: str, room: EngineRoom, config: BatonConfig) -> Iterator[Iterator[Change]]:
    """Groups of changes. Of each group, the first one that helps is suggested."""
    if room.on_gpu and room.dtype == "float32":
        yield iter([Change.of((("dtype",), "bfloat16"))])
        yield iter([_on_cpu(config)])
        return
    yield _smaller_tiers(room, config)
    yield _more_blocks(pool, room, config)
    yield _less_in_them(pool, room, config)
    yield _larger_steps(pool, room, config)
    yield _smaller_blocks(room, config)
    if room.gpu_share < 1.0:
        yield from (_less_growth(config, other) for other in config.pools)
        yield _larger_parts(room, config)
    for other in config.pools:
        yield (fewer(config, other, count) for count in range(first_replicas(config, other) - 1, 0, -1))


def memory_remedy(room: EngineRoom) -> str:
    """The remedy without a change of the configuration, if more memory would help."""
    is_tier_too_large = room.free_host_bytes is not None and room.host_bytes > room.free_host_bytes
    if room.memory_bytes is None and not is_tier_too_large:
        return ""
    try:
        size_engine(room.with_more_memory(PLENTY))
    except ConfigError:
        return ""
    return f"use {'GPUs' if room.on_gpu and not is_tier_too_large else 'machines'} with more memory"


def _smaller_tiers(room: EngineRoom, config: BatonConfig) -> Iterator[Change]:
    """Smaller tiers: most of the available memory, or what remains beside a KV cache for one request.

    Only for tiers that keep all their blocks in main memory.
    """
    free = room.free_host_bytes
    if not room.host_bytes or free is None:
        return
    needed = 0 if room.on_gpu else math.ceil(room.demand.bytes_per_sequence / CPU_CACHE_SHARE)
    options = config.transfer_options()
    for tier in options.tiers:
        tier_bytes = tier.main_memory_bytes(options)
        if tier_bytes < tier.num_bytes(options):
            continue
        for num_bytes in (int(free * MAX_CPU_SHARE), free - needed):
            rounded = (num_bytes - room.host_bytes + tier_bytes) // MIB * MIB
            if 0 < rounded < tier_bytes:
                yield Change.of((("kv_transfer", tier.size_key), rounded))


def _more_blocks(pool: str, room: EngineRoom, config: BatonConfig) -> Iterator[Change]:
    """Enough blocks for the longest request, and at least one per request, by the key that sets their number."""
    cache, demand = room.engine.cache, room.demand
    num_blocks = max(demand.blocks_per_sequence, demand.max_num_seqs)
    num_bytes = num_blocks * demand.layout.block_bytes
    if cache.num_blocks is not None:
        yield Change.of((_key(config, pool, "cache", "num_blocks"), num_blocks))
    elif cache.kv_cache_bytes is not None:
        yield Change.of((_key(config, pool, "cache", "kv_cache_bytes"), num_bytes))
    elif room.memory_bytes is None:
        return
    elif room.on_gpu:
        utilization = math.ceil(100 * (room.used_bytes + num_bytes) / room.memory_bytes / room.gpu_share) / 100
        if utilization <= MAX_UTILIZATION:
            yield Change.of((_key(config, pool, "cache", "gpu_memory_utilization"), utilization))
    elif num_bytes <= (room.memory_bytes - room.used_bytes) * MAX_CPU_SHARE:
        yield Change.of((_key(config, pool, "cache", "kv_cache_bytes"), num_bytes))


def _less_in_them(pool: str, room: EngineRoom, config: BatonConfig) -> Iterator[Change]:
    """Shorter requests, or fewer at a time, or both."""
    num_blocks = room.num_affordable_blocks
    if not num_blocks:
        return
    max_tokens = room.demand.max_tokens(num_blocks)
    if not max_tokens:
        return
    length = (("max_model_len",), max_tokens)
    count = (_key(config, pool, "scheduler", "max_num_seqs"), num_blocks)
    yield Change.of(length)
    yield Change.of(count)
    yield Change.of(length, count)


def _larger_steps(pool: str, room: EngineRoom, config: BatonConfig) -> Iterator[Change]:
    """Steps large enough for a block, or for the longest prompt if prompts are not split."""
    scheduler = room.engine.scheduler
    yield Change.of((_key(config, pool, "scheduler", "max_num_batched_tokens"), room.demand.layout.block_size))
    if not scheduler.enable_chunked_prefill:
        yield Change.of((_key(config, pool, "scheduler", "enable_chunked_prefill"), True))
        yield Change.of((_key(config, pool, "scheduler", "max_num_batched_tokens"), room.demand.max_model_len))


def _smaller_blocks(room: EngineRoom, config: BatonConfig) -> Iterator[Change]:
    """Smaller blocks, in both pools: KV cannot be handed over between different block sizes."""
    places: list[Key] = [(), *((pool,) for pool in config.pools)]
    given = [
        (*place, "cache", "block_size")
        for place, section in zip(places, (config, *map(config.pool, config.pools)), strict=True)
        if "block_size" in section.cache.model_fields_set  # type: ignore[attr-defined]  # made at run time
    ]
    for block_size in (room.engine.scheduler.max_num_batched_tokens, CacheConfig().block_size):
        if given and block_size < room.demand.layout.block_size:
            yield Change.of(*((key, block_size) for key in given))


def _less_growth(config: BatonConfig, pool: str) -> Iterator[Change]:
    """A lower maximum of workers: each possible worker has its part of a GPU reserved from the start."""
    scaling = config.pool(pool).scaling
    if scaling is not None:
        for count in range(scaling.max_replicas - 1, scaling.min_replicas - 1, -1):
            yield Change.of(((pool, "scaling", "max_replicas"), count))


def _larger_parts(room: EngineRoom, config: BatonConfig) -> Iterator[Change]:
    """Explicit parts of a GPU, which reserve nothing for workers that the load may add."""
    sections = [config.pool(pool) for pool in config.pools]
    if any(section.num_gpus is not None for section in sections) or all(
        section.scaling is None for section in sections
    ):
        return
    num_first = sum(first_replicas(config, pool) for pool in config.pools)
    for num_parts in range(round(1 / room.gpu_share) - 1, num_first - 1, -1):
        yield Change.of(*(((pool, "num_gpus"), math.floor(100 / num_parts) / 100) for pool in config.pools))


def _on_cpu(config: BatonConfig) -> Change:
    asked = [pool for pool in config.pools if config.pool(pool).num_gpus is not None]
    return Change.of((("device",), "cpu"), *(((pool, "num_gpus"), None) for pool in asked))


def _key(config: BatonConfig, pool: str, section: str, name: str) -> Key:
    """The key of a pool's setting: the one for both pools, if the setting is written only there."""
    own = getattr(config.pool(pool), section).model_fields_set
    shared = getattr(config, section).model_fields_set
    return (section, name) if name in shared and name not in own else (pool, section, name)
