"""An engine's settings: built once, checked when built, never changed. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from engine.contract.errors import ConfigError

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
DeviceName = Literal["auto", "cpu", "cuda"]
ModelImplName = Literal["auto", "native", "transformers"]
QueuePolicy = Literal["fcfs", "priority"]
LoadFailurePolicy = Literal["recompute", "fail"]
SpeculativeMethod = Literal["none", "ngram", "suffix", "draft_model"]
Switch = bool | Literal["auto"]
"""``auto``: on where it helps and works here; true: on, or refuse to start where it does not work; false: off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCode:
    """Which implementation computes a model.

    impl: ``native`` is Baton's own code, ``transformers`` that of transformers; ``auto`` prefers Baton's if it supports
        the model.
    trust_remote_code: run Python code for transformers that comes with the checkpoint.
    """

    impl: ModelImplName = "auto"
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfigSource:
    """Which checkpoint to load, the device and precision that it runs in, and whose code computes it."""

    path: Path
    device: DeviceName = "auto"
    dtype: DTypeName = "auto"
    num_threads: int | None = None
    code: ModelCode = field(default_factory=ModelCode)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSharing:
    """How a worker shares CPU cores with the cluster's other workers on its host, which may use its cores while it is
    idle.

    borrows: it uses theirs while they are idle.
    is_required: refuse to start if the system does not support that.
    """

    borrows: bool
    is_required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Size and behaviour of the paged KV cache. If neither ``kv_cache_bytes`` nor ``num_blocks`` is set, the size
    follows from the free memory.

    prefault: on a CPU, allocate the memory of the whole cache at startup, instead of block by block at first use.
    """

    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    num_blocks: int | None = None
    enable_prefix_caching: bool = True
    prefault: bool = False

    @property
    def has_size(self) -> bool:
        """True when the size is configured, and need not be measured."""
        return self.kv_cache_bytes is not None or self.num_blocks is not None

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {self.block_size}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        for name in ("kv_cache_bytes", "num_blocks"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"{name} must be at least 1, got {value}; leave it out to size the KV cache by the free memory"
                )
        if self.kv_cache_bytes is not None and self.num_blocks is not None:
            raise ConfigError(
                f"kv_cache_bytes ({self.kv_cache_bytes}) and num_blocks ({self.num_blocks}) both say how large the KV "
                "cache is: leave one out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policies of the scheduler. ``max_model_len`` None takes the model's own limit.

    long_prefill_token_threshold: the most tokens of one prompt per step; longer prompts count as long. 0: no limit.
    recompute_damaged_only: after a load failed partly, recompute only the damaged blocks. Otherwise, and always without
        chunked prefill, everything from the first damaged block on is recomputed.
    watermark: the share of all blocks that stays free when requests are admitted, so that running requests can grow.
    ask_again_s: interval at which a connector is asked again that does not know yet whether it has a prompt's KV.
    max_num_partial_prefills: the most prompts that may be partly computed at the same time, of which at most
        max_long_partial_prefills may be long. 0: no limit, for either.
    scheduler_delay_factor: new prompts wait for this many times the duration of the last step with prompts. 0: off.
    enable_priority_preemption: requests that wait, or whose KV was loaded, may preempt running ones of lower priority.
    artificial_preemption_probability: for tests, preempt without need, at most max_num_artificial_preemptions times.
    max_decode_steps: the most decode steps that run as one, while all running requests decode and none waits.
    cuts_decode_steps: if something happens meanwhile, the runner skips those of these steps that have not begun, and
        reports when each step ended. So requests do not wait for them, and those with a promised gap may take part.
    async_scheduling: schedule and launch a step before the previous one has returned; ``auto`` does so on GPUs,
        but not with draft tokens, nor if max_decode_steps is above 1.
    enable_cache_events: record changes of the prefix cache; the last cache_event_capacity records are kept.
    """

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
    max_num_partial_prefills: int = 0
    max_long_partial_prefills: int = 0
    scheduler_delay_factor: float = 0.0
    enable_priority_preemption: bool = False
    artificial_preemption_probability: float = 0.0
    max_num_artificial_preemptions: int = 0
    max_decode_steps: int = 1
    cuts_decode_steps: bool = False
    async_scheduling: Switch = "auto"
    enable_cache_events: bool = False
    cache_event_capacity: int = 65_536

    def runs_ahead(self, device_type: str, *, has_drafts: bool = False) -> bool:
        """True when an engine on such a device schedules a step while another one runs.

        On a CPU nothing could overlap: the device that computes also schedules. An engine that runs ahead cannot use
        draft tokens: they follow the newest token, which is unknown while a step is in flight.
        """
        if self.async_scheduling == "auto":
            return device_type != "cpu" and not has_drafts and self.max_decode_steps == 1
        return self.async_scheduling

    @property
    def prefill_chunk_tokens(self) -> int:
        """The most tokens of one prompt that a step computes; 0: prompts are computed whole."""
        if not self.enable_chunked_prefill:
            return 0
        return min(self.max_num_batched_tokens, self.long_prefill_token_threshold or self.max_num_batched_tokens)

    @property
    def most_tokens_of_request(self) -> int:
        """The most tokens of one request that a step computes."""
        return self.prefill_chunk_tokens or self.max_num_batched_tokens

    def __post_init__(self) -> None:
        for name in (
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_num_waiting",
            "max_decode_steps",
            "cache_event_capacity",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is smaller than max_num_seqs "
                f"({self.max_num_seqs}): not every running request could get a token; raise one or lower the other"
            )
        for name in (
            "long_prefill_token_threshold",
            "max_num_partial_prefills",
            "max_long_partial_prefills",
            "scheduler_delay_factor",
            "max_num_artificial_preemptions",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be >= 0, got {getattr(self, name)}")
        self._check_options()

    def _check_options(self) -> None:
        if not 0.0 <= self.artificial_preemption_probability <= 1.0:
            raise ConfigError(
                f"artificial_preemption_probability must be in [0, 1], got {self.artificial_preemption_probability}"
            )
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise ConfigError(
                f"max_long_partial_prefills ({self.max_long_partial_prefills}) is larger than max_num_partial_prefills "
                f"({self.max_num_partial_prefills}), which includes them: lower it"
            )
        if self.max_long_partial_prefills and not self.long_prefill_token_threshold:
            raise ConfigError(
                "max_long_partial_prefills needs long_prefill_token_threshold: set it to the length from which prompts "
                "are long"
            )
        if self.max_num_partial_prefills and not self.enable_chunked_prefill:
            raise ConfigError(
                "max_num_partial_prefills needs enable_chunked_prefill: set that, or leave max_num_partial_prefills out"
            )
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise ConfigError(
                f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) needs enable_chunked_prefill: "
                "set it to 0 or enable chunked prefill"
            )
        if self.enable_priority_preemption and self.policy != "priority":
            raise ConfigError(
                f"enable_priority_preemption needs policy 'priority', but policy is {self.policy!r}: set it"
            )
        if self.max_decode_steps > 1 and self.async_scheduling is True:
            raise ConfigError(
                f"max_decode_steps ({self.max_decode_steps}) and async_scheduling true cannot be combined: set "
                "max_decode_steps to 1, or async_scheduling to auto or false"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark must be in [0, 1), got {self.watermark}")
        if self.ask_again_s <= 0.0:
            raise ConfigError(f"ask_again_s must be positive, got {self.ask_again_s}")

    def check_fits(self, *, block_size: int, num_blocks: int, max_model_len: int) -> None:
        """Check against the size of the KV cache and the model's length.

        Raises:
            ConfigError: They contradict each other.
        """
        if self.max_num_batched_tokens < block_size:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is smaller than a block ({block_size} tokens)",
                remedy="raise it or lower block_size",
            )
        if self.max_num_seqs > num_blocks:
            raise ConfigError(
                f"max_num_seqs ({self.max_num_seqs}) is larger than the number of KV blocks ({num_blocks}): not every "
                "running request could hold one",
                remedy="lower max_num_seqs, or give the KV cache more memory (num_blocks, kv_cache_bytes or "
                "gpu_memory_utilization)",
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"without chunked prefill max_num_batched_tokens ({self.max_num_batched_tokens}) must not be smaller "
                f"than max_model_len ({max_model_len}): a prompt that long could never be scheduled",
                remedy="raise it, lower max_model_len or set enable_chunked_prefill",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUConfig:
    """Settings that only matter on a GPU.

    cuda_graphs: replay decode steps of up to max_graph_batch_size tokens as CUDA graphs; None: of any size that a
        decode step can have.
    compile_elementwise: fuse the operations between matrix products and attention into Baton's own kernels.
    """

    cuda_graphs: Switch = "auto"
    max_graph_batch_size: int | None = None
    compile_elementwise: Switch = "auto"

    def __post_init__(self) -> None:
        if self.max_graph_batch_size is not None and self.max_graph_batch_size < 1:
            raise ConfigError(
                f"max_graph_batch_size must be at least 1, got {self.max_graph_batch_size}; leave it out for the "
                "default, or set cuda_graphs to false"
            )


MAX_DRAFT_TOKENS: Final = 64
"""A step computes all drafts of a request but keeps only right ones; beyond this number, hardly ever are all right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding. It does not change the output, only the number of steps that the output takes.

    method: what proposes draft tokens. ``ngram`` searches the request for an earlier occurrence of its last tokens,
        ``suffix`` also searches earlier answers, and ``draft_model`` runs another model.
    num_tokens: the most drafts per request and step; ``auto``: as many as measurements show to pay off, at most 8.
    min_match, max_match: the fewest of the last tokens that must occur earlier, and the most that are compared.
    max_kept_tokens: the most tokens of earlier answers that ``suffix`` keeps.
    draft_model: the directory of the draft model's checkpoint, which must have the same vocabulary.
    draft_cache_tokens: size of the draft model's KV cache, in tokens of running requests.
    """

    method: SpeculativeMethod = "none"
    num_tokens: int | Literal["auto"] = "auto"
    min_match: int = 2
    max_match: int = 16
    max_kept_tokens: int = 1_000_000
    draft_model: Path | None = None
    draft_cache_tokens: int = 32_768

    def __post_init__(self) -> None:
        if self.num_tokens != "auto" and not 1 <= self.num_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(
                f"speculative.num_tokens must be auto or 1 to {MAX_DRAFT_TOKENS}, got {self.num_tokens}; method 'none' "
                "proposes no draft tokens"
            )
        if not 1 <= self.min_match <= self.max_match:
            raise ConfigError(
                f"speculative.min_match ({self.min_match}) and speculative.max_match ({self.max_match}) say how many "
                "of the last tokens must be found again: at least 1, and the first at most the second"
            )
        if self.max_kept_tokens < 0:
            raise ConfigError(f"speculative.max_kept_tokens must be >= 0, got {self.max_kept_tokens}")
        if self.method == "draft_model" and self.draft_model is None:
            raise ConfigError(
                "speculative.method is draft_model, but speculative.draft_model is not set: set it to the directory of "
                "a checkpoint"
            )
        if self.method != "draft_model" and self.draft_model is not None:
            raise ConfigError(
                f"speculative.draft_model is {str(self.draft_model)!r}, but speculative.method is {self.method!r}: "
                "set it to draft_model, or leave the model out"
            )
        if self.draft_cache_tokens < 1:
            raise ConfigError(f"speculative.draft_cache_tokens must be at least 1, got {self.draft_cache_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of one engine."""

    model: ModelConfigSource
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    gpu: GPUConfig = field(default_factory=GPUConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)

    def __post_init__(self) -> None:
        if self.scheduler.max_decode_steps > 1 and self.speculative.method != "none":
            raise ConfigError(
                f"max_decode_steps ({self.scheduler.max_decode_steps}) has no effect with speculative.method "
                f"{self.speculative.method!r}: set max_decode_steps to 1, or the method to none"
            )
        if self.cache.num_blocks is not None and self.scheduler.max_model_len is not None:
            self.scheduler.check_fits(
                block_size=self.cache.block_size,
                num_blocks=self.cache.num_blocks,
                max_model_len=self.scheduler.max_model_len,
            )
