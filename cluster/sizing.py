"""The arithmetic of one engine's memory, before it starts: weights, KV blocks, and what they can hold at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.model_config import ModelConfig, load_model_config
from engine.models.shards import find_shards
from engine.runner.memory import CacheDemand, MemoryBudget, choose_num_blocks, cpu_budget, gpu_budget
from kv_transfer.layout import KVLayout

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

GPU_CONTEXT_BYTES = 600 << 20
"""About what a CUDA context with its libraries takes of a GPU."""

STEP_ROWS = 8
"""About how many hidden-sized values a step keeps for each token beside the widest layer; a GPU measures it itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What a checkpoint weighs."""

    config: ModelConfig
    num_parameters: int

    @classmethod
    def of(cls, path: Path) -> ModelSize:
        """Count the parameters in the headers of its files.

        Raises:
            CheckpointError: It is no checkpoint.
        """
        return cls(config=load_model_config(path), num_parameters=sum(map(_count_parameters, _files(path))))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """One engine on one device. ``budget`` None: the device's memory is not known before it starts."""

    dtype: str
    weight_bytes: int
    demand: CacheDemand
    budget: MemoryBudget | None
    num_blocks: int | None

    @property
    def num_tokens(self) -> int | None:
        """Tokens that the KV cache holds."""
        return self.num_blocks * self.demand.layout.block_size if self.num_blocks is not None else None


def size_engine(
    engine: EngineConfig, model: ModelSize, *, on_gpu: bool, memory_bytes: int | None, cpu_dtype: str = ""
) -> EngineSize:
    """What an engine takes and what it can hold. ``memory_bytes`` is its device's, or its part of the host's.

    Raises:
        ConfigError: The device does not compute in this precision, or the KV cache could not hold one request; the
            message holds the arithmetic.
    """
    config = model.config
    name = engine.model.dtype
    dtype = name if name != "auto" else config.dtype if on_gpu else (cpu_dtype or config.cpu_dtype)
    if on_gpu and dtype == "float32":
        raise ConfigError(f"dtype float32 ({name}) does not run on cuda; use dtype bfloat16 or float16, or device cpu")
    layout = KVLayout(
        model_hash="",
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=engine.cache.block_size,
        dtype=dtype,
        bytes_per_element=DTYPE_BYTES[dtype],
    )
    demand = CacheDemand(
        layout=layout,
        max_model_len=engine.scheduler.max_model_len or config.max_model_len,
        max_num_seqs=engine.scheduler.max_num_seqs,
    )
    weight_bytes = model.num_parameters * DTYPE_BYTES[dtype]
    budget = _budget(engine, demand, model, weight_bytes=weight_bytes, on_gpu=on_gpu, memory_bytes=memory_bytes)
    is_known = budget is not None or engine.cache.num_blocks is not None
    return EngineSize(
        dtype=dtype,
        weight_bytes=weight_bytes,
        demand=demand,
        budget=budget,
        num_blocks=choose_num_blocks(engine.cache, demand, budget or _NOTHING) if is_known else None,
    )


_NOTHING = MemoryBudget(num_bytes=0, reason="not asked for")


def _budget(
    engine: EngineConfig,
    demand: CacheDemand,
    model: ModelSize,
    *,
    weight_bytes: int,
    on_gpu: bool,
    memory_bytes: int | None,
) -> MemoryBudget | None:
    if not on_gpu:
        if memory_bytes is None and engine.cache.kv_cache_bytes is None:
            return None
        return cpu_budget(engine.cache, demand, available_bytes=max((memory_bytes or 0) - weight_bytes, 0))
    if memory_bytes is None and engine.cache.kv_cache_bytes is None:
        return None
    return gpu_budget(
        engine.cache,
        total_bytes=memory_bytes or 0,
        used_bytes=weight_bytes + GPU_CONTEXT_BYTES,
        peak_step_bytes=_step_bytes(engine, model.config, DTYPE_BYTES[demand.layout.dtype]),
    )


def _step_bytes(engine: EngineConfig, config: ModelConfig, bytes_per_element: int) -> int:
    """About what the largest step takes beside the weights: activations, and logits in float32."""
    scheduler = engine.scheduler
    widest = 2 * config.intermediate_size + config.q_size + 2 * config.kv_size + STEP_ROWS * config.hidden_size
    logits = 2 * scheduler.max_num_seqs * config.vocab_size * 4
    return scheduler.max_num_batched_tokens * widest * bytes_per_element + logits


def _files(path: Path) -> list[Path]:
    return [shard.file for shard in find_shards(path)]


def _count_parameters(file: Path) -> int:
    with safe_open(file, framework="numpy") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
