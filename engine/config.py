"""An engine's settings: built once, checked when built, never changed. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engine.errors import ConfigError

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
DeviceName = Literal["auto", "cpu", "cuda"]
QueuePolicy = Literal["fcfs", "priority"]
LoadFailurePolicy = Literal["recompute", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfigSource:
    """Which checkpoint, where it runs and in what precision."""

    path: Path
    device: DeviceName = "auto"
    dtype: DTypeName = "auto"
    num_threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache. ``kv_cache_bytes`` and ``num_blocks`` override sizing from free memory."""

    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    num_blocks: int | None = None
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {self.block_size}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The token-budget scheduler. ``max_model_len`` None takes the model's own."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    max_model_len: int | None = None
    max_num_waiting: int = 4096
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    policy: QueuePolicy = "fcfs"
    load_failure_policy: LoadFailurePolicy = "recompute"
    recompute_damaged_only: bool = True
    watermark: float = 0.01
    ask_again_s: float = 0.005

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_num_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is smaller than max_num_seqs "
                f"({self.max_num_seqs}): not every running request could get a token; raise one or lower the other"
            )
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(f"long_prefill_token_threshold must be >= 0, got {self.long_prefill_token_threshold}")
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark is a share of the blocks in [0, 1), got {self.watermark}")
        if self.ask_again_s <= 0.0:
            raise ConfigError(f"ask_again_s must be positive, got {self.ask_again_s}")

    def check_fits(self, *, block_size: int, num_blocks: int, max_model_len: int) -> None:
        """Compare with the KV cache and the model's length.

        Raises:
            ConfigError: They contradict each other.
        """
        if self.max_num_batched_tokens < block_size:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is smaller than a block ({block_size} tokens)"
            )
        if self.max_num_seqs > num_blocks:
            raise ConfigError(
                f"max_num_seqs ({self.max_num_seqs}) is larger than the number of KV blocks ({num_blocks}): not every "
                "running request could hold one"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"without chunked prefill max_num_batched_tokens ({self.max_num_batched_tokens}) must not be smaller "
                f"than max_model_len ({max_model_len}): a prompt that long could never be scheduled"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of one engine."""

    model: ModelConfigSource
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
