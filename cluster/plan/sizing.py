"""The arithmetic of one engine's memory, before it starts: weights, KV blocks, and what they can hold at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from engine.contract.config import EngineConfig, ModelCode
from engine.contract.errors import ConfigError
from engine.device.memory import (
    GPU_CONTEXT_BYTES,
    CacheDemand,
    MemoryBudget,
    choose_num_blocks,
    cpu_budget,
    gpu_budget,
    mib,
    size_reason,
)
from engine.executor.draft_engine import DraftEngine
from engine.layers.experts.spec import BLOCKS_SUFFIX, SCALES_SUFFIX
from engine.model.model_shape import ModelShape
from engine.model.registry import ANY_CODE, load_model_config
from engine.model.weights.shards import find_shards
from kv_transfer.layout import KVLayout

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

STEP_ROWS = 8
"""Estimate of the hidden-sized values that a step keeps per token beside the widest layer. GPUs measure it instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The size of a checkpoint."""

    config: ModelShape
    num_parameters: int

    @classmethod
    def of(cls, path: Path, code: ModelCode = ANY_CODE) -> ModelSize:
        """Count the parameters from the headers of the checkpoint's files.

        Raises:
            CheckpointError: It is not a checkpoint.
        """
        config = load_model_config(path, code)
        counts = (_count_parameters(file, config.ignored_tensors) for file in _files(path))
        return cls(config=config, num_parameters=sum(counts))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """The memory of one engine on one device. ``budget`` None: the device's memory is not known before the start.
    ``reason`` says why the KV cache has its size.
    """

    dtype: str
    weight_bytes: int
    demand: CacheDemand
    budget: MemoryBudget | None
    num_blocks: int | None
    reason: str = ""
    host_bytes: int = 0
    """Main memory for tiers of evicted blocks."""

    draft_bytes: int = 0
    """Weights and KV cache of a draft model."""

    @property
    def num_tokens(self) -> int | None:
        """Tokens that the KV cache holds, if they are in the windows of all layers."""
        layout = self.demand.layout
        return self.num_blocks * layout.block_size // layout.num_groups if self.num_blocks is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRoom:
    """What one engine asks for and what its device has. Whether that fits is not checked yet.

    memory_bytes: memory of its device, or its part of the host's memory; None if not known before the start.
    gpu_share: its part of a shared GPU. step_bytes: estimate of what a step takes beside the weights.
    host_bytes: main memory for tiers. host_memory_bytes: its part of the host's memory; None while it has no host.
    draft_bytes: device memory for the weights and the KV cache of a draft model.
    """

    engine: EngineConfig
    dtype: str
    demand: CacheDemand
    on_gpu: bool
    memory_bytes: int | None
    weight_bytes: int
    step_bytes: int
    gpu_share: float
    host_bytes: int
    host_memory_bytes: int | None
    draft_bytes: int = 0

    @classmethod
    def of(
        cls,
        engine: EngineConfig,
        model: ModelSize,
        *,
        on_gpu: bool,
        memory_bytes: int | None,
        gpu_share: float = 1.0,
        cpu_dtype: str = "",
        host_bytes: int = 0,
        host_memory_bytes: int | None = None,
    ) -> EngineRoom:
        """An engine with these settings, which already include its part of a GPU's memory."""
        config = model.config
        dtype = _dtype_of(engine, config, on_gpu=on_gpu, cpu_dtype=cpu_dtype)
        layout = _layout_of(engine, config, dtype)
        demand = CacheDemand(
            layout=layout,
            max_model_len=engine.scheduler.max_model_len or config.max_model_len,
            max_num_seqs=engine.scheduler.max_num_seqs,
            chunk_tokens=engine.scheduler.most_tokens_of_request,
        )
        return cls(
            engine=engine,
            dtype=dtype,
            demand=demand,
            on_gpu=on_gpu,
            memory_bytes=memory_bytes,
            weight_bytes=model.num_parameters * DTYPE_BYTES[dtype],
            step_bytes=_step_bytes(engine, config, DTYPE_BYTES[dtype]),
            gpu_share=gpu_share,
            host_bytes=host_bytes,
            host_memory_bytes=host_memory_bytes,
            draft_bytes=_draft_bytes(engine, on_gpu=on_gpu, cpu_dtype=cpu_dtype),
        )

    def with_more_memory(self, factor: int) -> EngineRoom:
        """The same engine on a device and a host with ``factor`` times as much memory."""
        device, host = (known and known * factor for known in (self.memory_bytes, self.host_memory_bytes))
        return dataclasses.replace(self, memory_bytes=device, host_memory_bytes=host)

    @property
    def used_bytes(self) -> int:
        """Memory that the engine takes beside the KV cache."""
        return self.weight_bytes + self.draft_bytes + (GPU_CONTEXT_BYTES + self.step_bytes if self.on_gpu else 0)

    @property
    def free_host_bytes(self) -> int | None:
        """Host memory that the engine leaves for evicted blocks; a KV cache of unspecified size is not subtracted."""
        if self.host_memory_bytes is None:
            return None
        own_bytes = 0 if self.on_gpu else self.weight_bytes + self.draft_bytes + self._given_cache_bytes
        return max(self.host_memory_bytes - own_bytes, 0)

    @property
    def _given_cache_bytes(self) -> int:
        cache = self.engine.cache
        if cache.num_blocks is not None:
            return cache.num_blocks * self.demand.layout.block_bytes
        return cache.kv_cache_bytes or 0

    @property
    def budget(self) -> MemoryBudget | None:
        """The memory budget of the KV cache; None while it is not known."""
        cache = self.engine.cache
        if self.memory_bytes is None and cache.kv_cache_bytes is None:
            return None
        if not self.on_gpu:
            own_bytes = self.weight_bytes + self.draft_bytes + self.host_bytes
            available_bytes = max((self.memory_bytes or 0) - own_bytes, 0)
            return cpu_budget(cache, self.demand, available_bytes=available_bytes)
        return gpu_budget(
            cache,
            total_bytes=self.memory_bytes or 0,
            used_bytes=self.weight_bytes + self.draft_bytes + GPU_CONTEXT_BYTES,
            peak_step_bytes=self.step_bytes,
        )

    @property
    def num_affordable_blocks(self) -> int | None:
        """The most KV blocks that fit; None while that is not known."""
        if self.engine.cache.num_blocks is not None:
            return self.engine.cache.num_blocks
        budget = self.budget
        return budget.num_bytes // self.demand.layout.block_bytes if budget is not None else None


class MisfitError(ConfigError):
    """Settings of an engine that do not fit its device or each other. The lowest ``stage`` is raised first."""

    def __init__(self, error: ConfigError, *, stage: int) -> None:
        super().__init__(error.what, remedy=error.remedy)
        self.stage = stage


def size_engine(room: EngineRoom) -> EngineSize:
    """The memory that an engine takes, and the requests that it can hold.

    Raises:
        MisfitError: The device does not compute in this precision, evicted blocks do not fit on the host, the KV
            cache could not hold one request, or the scheduler would refuse it; the message has the arithmetic.
    """
    checks = (_check_dtype, _check_host_tier, _choose, _check_block, _check_requests, _check_prompt)
    for stage, check in enumerate(checks):
        try:
            check(room)
        except ConfigError as error:
            raise MisfitError(error, stage=stage) from error
    return EngineSize(
        dtype=room.dtype,
        weight_bytes=room.weight_bytes,
        demand=room.demand,
        budget=room.budget,
        num_blocks=_choose(room),
        reason=size_reason(room.engine.cache, room.demand, room.budget),
        host_bytes=room.host_bytes,
        draft_bytes=room.draft_bytes,
    )


def _check_dtype(room: EngineRoom) -> None:
    if room.on_gpu and room.dtype == "float32":
        raise ConfigError(
            "dtype float32 is not supported on cuda", remedy="use dtype auto, bfloat16 or float16, or device cpu"
        )


def _check_host_tier(room: EngineRoom) -> None:
    free = room.free_host_bytes
    if free is None or room.host_bytes <= free:
        return
    less = "" if room.on_gpu else ", minus its weights and the configured KV cache"
    raise ConfigError(
        f"tiers of evicted KV blocks (kv_transfer.chain) would take {mib(room.host_bytes)}, but {mib(free)} are there: "
        f"a worker's part of its machine's memory is {mib(room.host_memory_bytes or 0)}{less}"
    )


def _choose(room: EngineRoom) -> int | None:
    """The number of blocks that the engine will have; None while it is not known."""
    if room.num_affordable_blocks is None:
        return None
    return choose_num_blocks(room.engine.cache, room.demand, room.budget or _NOTHING)


def _check_block(room: EngineRoom) -> None:
    block_size = room.demand.layout.block_size
    room.engine.scheduler.check_fits(block_size=block_size, num_blocks=room.demand.max_num_seqs, max_model_len=0)


def _check_requests(room: EngineRoom) -> None:
    num_blocks = _choose(room)
    if num_blocks is not None:
        room.engine.scheduler.check_fits(block_size=0, num_blocks=num_blocks, max_model_len=0)


def _check_prompt(room: EngineRoom) -> None:
    demand = room.demand
    room.engine.scheduler.check_fits(block_size=0, num_blocks=demand.max_num_seqs, max_model_len=demand.max_model_len)


_NOTHING = MemoryBudget(num_bytes=0, reason="not asked for")


def _step_bytes(engine: EngineConfig, config: ModelShape, bytes_per_element: int) -> int:
    """Estimate of what the largest step takes beside the weights: activations, and logits in float32."""
    scheduler = engine.scheduler
    widest = config.mlp_size + config.q_size + 2 * config.kv_size + STEP_ROWS * config.hidden_size
    logits = 2 * scheduler.max_num_seqs * config.vocab_size * 4
    return scheduler.max_num_batched_tokens * widest * bytes_per_element + logits


def _dtype_of(engine: EngineConfig, config: ModelShape, *, on_gpu: bool, cpu_dtype: str) -> str:
    name = engine.model.dtype
    return name if name != "auto" else config.gpu_dtype if on_gpu else (cpu_dtype or config.cpu_dtype)


def _layout_of(engine: EngineConfig, config: ModelShape, dtype: str) -> KVLayout:
    return KVLayout(
        model_hash="",
        groups=config.kv_cache_groups,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_parts=config.num_kv_parts,
        block_size=engine.cache.block_size,
        dtype=dtype,
        bytes_per_element=DTYPE_BYTES[dtype],
    )


def _draft_bytes(engine: EngineConfig, *, on_gpu: bool, cpu_dtype: str) -> int:
    """Bytes of weights and KV cache of an engine's draft model; 0 if it has none."""
    draft = DraftEngine.of(engine)
    if draft is None:
        return 0
    config, model = draft.config, ModelSize.of(draft.config.model.path, engine.model.code)
    dtype = _dtype_of(config, model.config, on_gpu=on_gpu, cpu_dtype=cpu_dtype)
    cache_bytes = (config.cache.num_blocks or 0) * _layout_of(config, model.config, dtype).block_bytes
    return model.num_parameters * DTYPE_BYTES[dtype] + cache_bytes


def _files(path: Path) -> list[Path]:
    return [shard.file for shard in find_shards(path)]


def _count_parameters(file: Path, ignored: tuple[str, ...]) -> int:
    with safe_open(file, framework="numpy") as tensors:
        names = [name for name in tensors.keys() if not name.startswith(ignored)]  # noqa: SIM118
        return sum(_num_parameters(name, tensors.get_slice(name).get_shape()) for name in names)


def _num_parameters(name: str, shape: Sequence[int]) -> int:
    """Parameters of a tensor as computed: four-bit weights are expanded to the model's dtype, with their scales."""
    if name.endswith(SCALES_SUFFIX):
        return 0
    return math.prod(shape) * (2 if name.endswith(BLOCKS_SUFFIX) else 1)
