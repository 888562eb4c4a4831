"""The configuration of a cluster: the schema of baton.yaml and of the command line's flags."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from cluster.booking import check_amount, check_custom_resource
from cluster.config_section import Section, section_of, settings_from
from cluster.health import HealthSection
from cluster.scaling import ScalingSection
from engine.config import (
    CacheConfig,
    DeviceName,
    DTypeName,
    EngineConfig,
    GPUConfig,
    ModelConfigSource,
    SchedulerConfig,
)
from engine.errors import ConfigError
from kv_transfer.errors import KVTransferError
from kv_transfer.fault_options import FaultOptions
from kv_transfer.options import ConnectorOptions
from router.policies import policy_names
from router.security import SecuritySettings
from router.settings import MetricsCompat, RouterSettings

HttpProxy = Literal["serve", "haproxy"]
PoolName = Literal["prefill", "decode"]

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")

CacheSection = section_of(
    "CacheSection",
    CacheConfig,
    descriptions={
        "block_size": "Tokens in a KV block.",
        "gpu_memory_utilization": "Share of a GPU's memory that weights and KV cache may take together.",
        "kv_cache_bytes": "Bytes of the KV cache, at least 1; overrides sizing from free memory.",
        "num_blocks": "Blocks of the KV cache, at least 1; overrides sizing from free memory.",
        "enable_prefix_caching": "Keep the KV of finished requests for prompts that begin alike.",
    },
)

SchedulerSection = section_of(
    "SchedulerSection",
    SchedulerConfig,
    omit={"max_model_len"},
    descriptions={
        "max_num_batched_tokens": "Tokens computed in one step at most, over all requests.",
        "max_num_seqs": "Requests that run at the same time at most.",
        "max_num_waiting": "Requests that wait in an engine at most.",
        "enable_chunked_prefill": "Split prompts that do not fit into a step.",
        "long_prefill_token_threshold": "Tokens of one prompt in a step at most; 0 means no such limit.",
        "policy": "Order of waiting requests: first come first served, or by priority.",
        "load_failure_policy": "When KV could not be fetched: compute it again, or fail the request.",
        "recompute_damaged_only": "Compute again only the blocks that were not fetched, not all from the first on.",
        "watermark": "Share of the KV blocks that stays free when requests are admitted.",
        "ask_again_s": "Pause before a connector that does not know yet is asked again.",
        "max_num_partial_prefills": "Prompts that may be computed in part at the same time; 0 means no such limit.",
        "max_long_partial_prefills": "Long prompts among them; 0 means no such limit.",
        "scheduler_delay_factor": "Hold new prompts back for so many times the latency of the last; 0 means never.",
        "enable_priority_preemption": "Let waiting requests take the place of running ones of lower priority.",
        "artificial_preemption_probability": "Preempt without need, for tests.",
        "max_num_artificial_preemptions": "How often at most.",
        "async_scheduling": "Schedule and launch a step before the result of the one before is there; `auto`: on GPUs.",
        "enable_cache_events": "Record what the prefix cache stores and removes.",
        "cache_event_capacity": "Records kept at most.",
    },
)

GPUSection = section_of(
    "GPUSection",
    GPUConfig,
    descriptions={
        "cuda_graphs": "Replay decode steps as CUDA graphs: `auto` on decode workers whose GPU can, `true` or fail to "
        "start, `false` never. See docs/gpu.md.",
        "max_graph_batch_size": "Requests of the largest step that is a graph; null takes `max_num_seqs`.",
        "compile_elementwise": "Generate kernels for what lies between matrix products and attention, likewise.",
    },
)

FaultsSection = section_of(
    "FaultsSection",
    FaultOptions,
    descriptions={
        "seed": "Same seed, same faults.",
        "read_fails": "Probability that a read fails.",
        "read_hangs": "Probability that a read never ends.",
        "read_late": "Probability that a read begins and ends `late_s` later.",
        "bit_flips": "Probability that one bit of what a read brought is wrong.",
        "handshake_refused": "Probability that a handshake is refused.",
        "notification_lost": "Probability that a message does not arrive.",
        "notification_late": "Probability that a message is sent `late_s` later.",
        "notification_twice": "Probability that a message arrives twice.",
        "lease_expired": "Probability that a lease has expired when its reader is done.",
        "peer_replaced": "Probability that a read finds another life of its peer.",
        "late_s": "How late is late.",
        "schedule": "Occasions to take by number: a list of `{fault, nth}`.",
    },
)

TransferSection = section_of(
    "TransferSection",
    ConnectorOptions,
    optional_sections={"faults": FaultsSection},
    descriptions={
        "connector": "What supplies KV blocks: `nixl` moves them between workers; `chain` asks several sources.",
        "chain": "Sources of the connector `chain`, in the order in which they are asked: `nixl`, and `host`, which "
        "keeps blocks that the prefix cache evicts. `[host, nixl]` reads from peers only what is not in main memory.",
        "host_bytes": "Main memory that each worker's host tier may take; committed as it is used.",
        "lease_ttl_s": "How long a prefill worker keeps blocks for a decode worker that does not report.",
        "handshake_timeout_s": "How long two workers may take to meet.",
        "load_timeout_s": "How long fetching a prompt's KV may take.",
        "answer_timeout_s": "How long a worker from which KV is fetched may be silent before others go on without it; "
        "1 s more for each 16 MiB that are being read from it.",
        "streamed": "Fetch a prompt's KV while it is computed, so that only its last part is left to fetch: `true` "
        "after every chunk, `auto` in steps of 50 ms at least where the KV cache lies in host memory.",
        "checksums": "Compare every block that was fetched with what its prefill worker had; null: where the KV cache "
        "lies in host memory, where it costs less than 2 % of the time to first token (benchmarks/kv_transfer.py).",
        "faults": "Faults to suffer on purpose, for tests.",
        "allow_faults": "Confirms that `faults` are meant.",
    },
)

RouterSection = section_of(
    "RouterSection",
    RouterSettings,
    omit={"metrics_compat"},
    descriptions={
        "max_body_bytes": "Largest request body.",
        "max_body_values": "JSON values of a request body at most; an object counts as 25 of them.",
        "read_timeout_s": "How long a request body may take to arrive.",
        "max_num_requests": "Sequences in progress at most; past it the answer is 429.",
        "max_num_queued": "Sequences that wait for room on a decode worker at most; past it the answer is 429.",
        "max_num_choices": "Largest `n` or `best_of` of a request, times its prompts.",
        "max_num_stop_strings": "Stop strings of a request at most.",
        "max_logprobs": "Most likely tokens that a request may ask for beside each token.",
        "default_timeout_s": "Deadline of a request that names none.",
        "max_timeout_s": "Longest deadline that a request may name.",
        "admin_api": "Take orders to workers at `/admin`. Only where the API listens on this machine alone, or has "
        "`security.admin_keys`.",
        "default_max_tokens": "Length of an answer whose request names none; null fills the context.",
        "prefill_timeout_s": "How long a prefill worker may take for one prompt.",
        "submit_timeout_s": "How long a decode worker may take to accept requests.",
        "connect_timeout_s": "How long opening the stream of a decode worker may take.",
        "stream_silence_timeout_s": "How long a decode worker may say nothing before it counts as lost.",
        "unresponsive_after_s": "How long a worker may leave status calls unanswered before it counts as lost.",
        "local_prefill_tokens": "A prompt of which the decode worker lacks at most so many tokens is computed there, "
        "not on a prefill worker; 0 sends all to prefill workers.",
        "session_header": "Header whose value names a session: its requests go to the same workers; null ignores it.",
        "session_max_usage_lead": "A session's worker may be so much fuller than the emptiest, in KV usage.",
        "session_max_queue_lead": "It may have so many more prompt tokens waiting than the worker with the fewest.",
        "max_mirrored_blocks": "Blocks of prefix caches that a router remembers at most, about 200 bytes each.",
        "max_prefill_attempts": "Prefill workers tried for one request at most.",
        "write_timeout_s": "How long a client may leave an event unread before its request is given up.",
        "max_write_delay_s": "With many streams, how long tokens may wait to be written together; 0: never.",
        "migration_limit": "How often a request may move to another decode worker.",
        "prefill_lost_policy": "When a prefill worker is lost before it answered: another one (the decode worker where "
        "none is left), the decode worker at once, or an error.",
        "kv_lost_policy": "When a prompt's KV was lost before it was read: what is estimated to cost less waiting, "
        "prefill again, compute on the decode worker, or an error.",
        "decode_lost_policy": "When a decode worker is lost: another one goes on from the tokens sent, or an error.",
        "recovery_wait_s": "How long an accepted request waits for a worker to come back.",
        "growth_headroom_tokens": "Room beyond its prompt that a request must find on a decode worker.",
        "report_period_s": "How often idle workers report their load; twice that without news, and a worker gets "
        "requests only while no other one can take them.",
        "status_timeout_s": "How long a worker may take to report its status.",
        "peer_period_s": "How often routers ask each other for what they counted.",
        "abort_timeout_s": "How long a worker may take to confirm an abort.",
        "backoff_min_s": "First wait before a failed worker is tried again.",
        "backoff_max_s": "Longest such wait.",
        "retry_after_s": "What `Retry-After` tells a client that was turned away.",
        "prefill_policy": f"How a prefill worker is chosen: {', '.join(policy_names())}.",
        "decode_policy": "How a decode worker is chosen, likewise.",
    },
)

SecuritySection = section_of(
    "SecuritySection",
    SecuritySettings,
    descriptions={
        "api_keys": "Hashes of the keys that open the API, from `baton keys new`; without any it is open to all.",
        "admin_keys": "Hashes of the keys that also open `/status`, `/metrics` and fault injection.",
        "api_key_file": "File with more hashes of API keys, one a line; read where `baton serve` runs.",
        "admin_key_file": "File with more hashes of admin keys.",
        "open_metrics": "Let everybody read `/metrics`.",
        "max_num_headers": "Headers of a request at most.",
        "max_header_bytes": "Bytes of a request's URL and headers at most.",
        "cors_allow_origins": "Origins of web pages that may call the API from a browser; `*` means all.",
    },
)


class MetricsSection(Section):
    """What `/metrics` offers."""

    compat: MetricsCompat = Field(
        default="none", description="Add the names of another system, for dashboards made for it."
    )


class PoolSection(Section):
    """What differs between the two pools; everything is optional."""

    num_threads: int | None = Field(
        default=None, ge=1, description="CPU threads of one worker; null shares the machine's cores evenly."
    )
    num_cpus: float | None = Field(
        default=None, ge=0, description="CPUs that Ray reserves for one worker; null takes a small fraction."
    )
    num_gpus: float | None = Field(
        default=None, ge=0, description="GPUs that Ray reserves for one worker; null takes what the device asks for."
    )
    resources: dict[str, float] = Field(
        default_factory=dict,
        description="Custom Ray resources that one worker takes: `{baton_prefill: 0.001}` keeps a pool on the machines "
        "whose Ray was started with `baton_prefill`.",
    )
    max_per_node: int | None = Field(
        default=None,
        ge=1,
        le=100,
        description="Workers of this pool on one machine at most, so that no machine takes too many along when it "
        "dies; the replacement of a worker then waits for a machine with fewer. Null: spread as well as Ray can.",
    )
    cache: CacheSection = Field(default_factory=CacheSection, description="Overrides `cache` for this pool.")  # type: ignore[valid-type]
    scheduler: SchedulerSection = Field(  # type: ignore[valid-type]
        default_factory=SchedulerSection, description="Overrides `scheduler` for this pool."
    )
    gpu: GPUSection = Field(default_factory=GPUSection, description="Overrides `gpu` for this pool.")  # type: ignore[valid-type]
    scaling: ScalingSection | None = Field(
        default=None, description="Let the pool follow its load; null keeps its number of workers."
    )

    @field_validator("num_cpus", "num_gpus")
    @classmethod
    def _check_amount(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None:
            check_amount(info.field_name or "", value)
        return value

    @field_validator("resources")
    @classmethod
    def _check_resources(cls, value: dict[str, float]) -> dict[str, float]:
        for name, amount in value.items():
            check_custom_resource(name, amount)
        return value


class BatonConfig(Section):
    """A cluster. Every flag of `baton serve` is one of these keys."""

    model: Path | None = Field(
        default=None, description="Hugging Face directory of the model; null takes the small built-in model."
    )
    served_model_name: str | None = Field(
        default=None, min_length=1, description="Name of the model in the API; null takes the directory's name."
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="Address that the HTTP API listens on.")
    port: int = Field(default=8000, ge=1, le=65535, description="Port that the HTTP API listens on.")
    device: DeviceName = Field(default="auto", description="Where models run; auto takes a GPU where there is one.")
    dtype: DTypeName = Field(
        default="auto", description="Precision; auto takes the checkpoint's, or float32 on a CPU that emulates that."
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="Longest prompt and answer together; null takes the model's own."
    )
    prefill_replicas: int = Field(default=1, ge=1, description="Workers that compute prompts.")
    decode_replicas: int = Field(default=1, ge=1, description="Workers that generate.")
    router_replicas: int = Field(default=1, ge=1, description="Processes that speak HTTP.")
    router_per_node: bool = Field(
        default=False, description="One router on each machine of the cluster, whatever `router_replicas` says."
    )
    address: str | None = Field(
        default=None, description="Ray cluster to deploy to; null starts a private Ray on this machine."
    )
    object_store_bytes: int = Field(
        default=128 * 1024 * 1024, ge=80 * 1024 * 1024, description="Object store of the private Ray."
    )
    http_proxy: HttpProxy = Field(
        default="serve",
        description="What accepts HTTP: Serve's own proxy, or HAProxy: faster, but with statistics and metrics ports "
        "that are open on all interfaces.",
    )
    startup_timeout_s: float = Field(default=600.0, gt=0, description="How long all workers may take to be ready.")
    cache: CacheSection = Field(default_factory=CacheSection, description="The KV cache of every worker.")  # type: ignore[valid-type]
    scheduler: SchedulerSection = Field(  # type: ignore[valid-type]
        default_factory=SchedulerSection, description="The scheduler of every worker."
    )
    gpu: GPUSection = Field(default_factory=GPUSection, description="What only workers on GPUs do.")  # type: ignore[valid-type]
    kv_transfer: TransferSection = Field(default_factory=TransferSection, description="The hand-over of KV.")  # type: ignore[valid-type]
    router: RouterSection = Field(default_factory=RouterSection, description="Bounds and waits of the router.")  # type: ignore[valid-type]
    security: SecuritySection = Field(  # type: ignore[valid-type]
        default_factory=SecuritySection, description="Who may call the API: docs/security.md."
    )
    health: HealthSection = Field(default_factory=HealthSection, description="When workers count as hanging.")
    metrics: MetricsSection = Field(default_factory=MetricsSection, description="What `/metrics` offers.")
    prefill: PoolSection = Field(default_factory=PoolSection, description="Prefill workers only.")
    decode: PoolSection = Field(default_factory=PoolSection, description="Decode workers only.")

    @field_validator("model")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        if value is None:
            return None
        try:
            return value.expanduser().absolute()
        except RuntimeError as error:
            raise ValueError(f"there is no user {value.parts[0][1:]!r}; your own folder is ~/") from error

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            prefill = self.engine_config("prefill", model=Path(), num_threads=1)
            decode = self.engine_config("decode", model=Path(), num_threads=1)
            transfer = self.transfer_options()
            self.router_settings()
            self.security_settings()
        except (ConfigError, KVTransferError) as error:
            raise ValueError(str(error)) from error
        if prefill.cache.block_size != decode.cache.block_size:
            raise ValueError(
                f"prefill.cache.block_size ({prefill.cache.block_size}) and decode.cache.block_size "
                f"({decode.cache.block_size}) differ: blocks could not be handed over"
            )
        if self.http_proxy == "haproxy" and self.address is not None:
            raise ValueError("http_proxy 'haproxy' and address exclude each other: HAProxy is chosen where Ray starts")
        if transfer.lender != "nixl":
            raise ValueError(
                f"kv_transfer.{'chain' if transfer.chain else 'connector'} {transfer.lender!r} works within one "
                "process only; a cluster needs 'nixl'"
            )
        for pool, cache in (("prefill", prefill.cache), ("decode", decode.cache)):
            if transfer.host_bytes and not cache.enable_prefix_caching:
                raise ValueError(
                    f"kv_transfer.host_bytes is {transfer.host_bytes}, but {pool}.cache.enable_prefix_caching is "
                    "false: the host tier keeps what the prefix cache evicts"
                )
        return self

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        for pool, section in (("prefill", self.prefill), ("decode", self.decode)):
            if section.num_gpus is not None and (section.num_gpus > 0) == (self.device == "cpu"):
                raise ValueError(
                    f"{pool}.num_gpus ({section.num_gpus:g}) and device ({self.device}) contradict each other: with "
                    "device cpu no worker takes a GPU, else each takes a part of one at least"
                )
        return self

    def engine_config(self, pool: PoolName, *, model: Path, num_threads: int) -> EngineConfig:
        """The settings of one pool's engines; ``num_threads`` holds where the pool names none."""
        section: PoolSection = self.prefill if pool == "prefill" else self.decode
        return EngineConfig(
            model=ModelConfigSource(
                path=model, device=self.device, dtype=self.dtype, num_threads=section.num_threads or num_threads
            ),
            cache=settings_from(CacheConfig, self.cache, section.cache),
            scheduler=settings_from(
                SchedulerConfig,
                self.scheduler,
                section.scheduler,
                max_model_len=self.max_model_len,
                **({"enable_cache_events": True} if self._is_mirrored(pool) else {}),
            ),
            gpu=self._gpu_config(pool, section),
        )

    def _gpu_config(self, pool: PoolName, section: PoolSection) -> GPUConfig:
        gpu = settings_from(GPUConfig, self.gpu, section.gpu)
        if pool == "prefill" and gpu.cuda_graphs == "auto":  # its requests end before their first decode step
            return dataclasses.replace(gpu, cuda_graphs=False)
        return gpu

    def transfer_options(self) -> ConnectorOptions:
        """The settings of every worker's connector."""
        faults: Section | None = self.kv_transfer.faults  # type: ignore[attr-defined]  # the section is made at run time
        if faults is None:
            return settings_from(ConnectorOptions, self.kv_transfer)
        return settings_from(ConnectorOptions, self.kv_transfer, faults=settings_from(FaultOptions, faults))

    def router_settings(self) -> RouterSettings:
        """The settings of every router."""
        settings = settings_from(RouterSettings, self.router, metrics_compat=self.metrics.compat)
        is_guarded = self.host in LOOPBACK_HOSTS or self.security_settings().has_keys
        return dataclasses.replace(settings, admin_api=settings.admin_api and is_guarded)

    def security_settings(self) -> SecuritySettings:
        """Keys and limits of every router, with key files not yet read."""
        return settings_from(SecuritySettings, self.security)

    def _is_mirrored(self, pool: PoolName) -> bool:
        """True when the routers need to know what is cached in a pool."""
        router = self.router_settings()
        return router.mirrors_prefill_cache if pool == "prefill" else router.mirrors_decode_cache
