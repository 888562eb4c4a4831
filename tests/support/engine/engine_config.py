"""Settings of small engines on the CPU."""

from __future__ import annotations

from pathlib import Path

from engine.contract.config import CacheConfig, EngineConfig, ModelConfigSource, SchedulerConfig, Switch
from tests.support.engine.oracle_cases import BLOCK_SIZE


def small_engine_config(
    path: Path,
    *,
    block_size: int = BLOCK_SIZE,
    num_blocks: int | None = None,
    max_num_batched_tokens: int = 128,
    async_scheduling: Switch = "auto",
) -> EngineConfig:
    """An engine in float32 whose cache holds about 6,000 tokens unless said otherwise."""
    return EngineConfig(
        model=ModelConfigSource(path=path, device="cpu", dtype="float32"),
        cache=CacheConfig(block_size=block_size, num_blocks=num_blocks or 6144 // block_size),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=16, async_scheduling=async_scheduling
        ),
    )
