"""The keys of baton.yaml, which are the flags of the command line as well."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from cluster.config.config_section import Section
from cluster.config.pool import PoolSection
from cluster.config.scaling import MAX_REPLICAS
from cluster.config.settings_sections import (
    CacheSection,
    GPUSection,
    HealthSection,
    MetricsSection,
    RouterSection,
    SchedulerSection,
    SecuritySection,
    SLOSection,
    SpeculativeSection,
    TracingSection,
    TransferSection,
)
from engine.contract.config import DeviceName, DTypeName, ModelImplName, Switch
from router.settings import DEFAULT_ROLES, RolesMode

HttpProxy = Literal["auto", "none", "serve", "haproxy"]


class ConfigKeys(Section):
    """The keys, their types and their defaults, each checked by itself. A role's pool has a number and a section."""

    model: Path | None = Field(
        default=None,
        description="Hugging Face directory of the model; null takes the small built-in model. A relative path in a "
        "file counts from the file's folder, on the command line from the current one; so do all other paths.",
    )
    served_model_name: str | tuple[str, ...] | None = Field(
        default=None,
        description="Name of the model in the API, or a list of accepted names, the first of which appears in "
        "answers. Null takes the directory's name.",
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="Address that the HTTP API listens on.")
    port: int = Field(default=8000, ge=1, le=65535, description="Port that the HTTP API listens on.")
    device: DeviceName = Field(default="auto", description="Where models run; `auto` takes a GPU if there is one.")
    dtype: DTypeName = Field(
        default="auto",
        description="Precision of weights and computation. `auto` takes the checkpoint's, but float32 on a CPU that "
        "only emulates it, and 16 bits on a GPU.",
    )
    model_impl: ModelImplName = Field(
        default="auto",
        description="Implementation of the model: `native` is Baton's own, `transformers` that of transformers with "
        "Baton's attention; `auto` prefers Baton's where it exists ([models.md](models.md)).",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python code for transformers that comes with the checkpoint. It can do anything that you can.",
    )
    borrow_idle_cores: Switch = Field(
        default="auto",
        description="Let a busy CPU worker also use the cores of idle workers on its host until they have work. "
        "`auto`: where the system supports it and the pool does not set `num_threads`; `true`: in every pool, or "
        "refuse to start; `false`: never.",
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="Most tokens of prompt and answer together. Null takes the model's own limit."
    )
    prefill_replicas: int = Field(
        default=1,
        ge=1,
        le=MAX_REPLICAS,
        description="Number of prefill workers, which compute prompts. With `scaling`, the initial number, kept "
        "within its bounds.",
    )
    decode_replicas: int = Field(
        default=1,
        ge=1,
        le=MAX_REPLICAS,
        description="Number of decode workers, which generate tokens. With `scaling`, the initial number, kept within "
        "its bounds.",
    )
    mixed_replicas: int = Field(
        default=0,
        ge=0,
        le=MAX_REPLICAS,
        description="Number of mixed workers, which compute prompts and generate, also with `roles: fixed`. With "
        "`scaling`, the initial number, kept within its bounds.",
    )
    roles: RolesMode = Field(
        default=DEFAULT_ROLES,
        description="`elastic`: every worker takes prompts and decoding alike, placed by predicted latency, and its "
        "role is only a preference ([routing.md](routing.md)). `fixed`: prefill workers only compute prompts, decode "
        "workers generate, mixed workers do both.",
    )
    router_replicas: int = Field(
        default=1,
        ge=1,
        le=MAX_REPLICAS,
        description="Number of router processes, which serve the HTTP API. Without a proxy in front, each connection "
        "stays with one of them.",
    )
    router_per_node: bool = Field(
        default=False, description="Run one router on each machine of the cluster; `router_replicas` is then ignored."
    )
    address: str | None = Field(
        default=None, description="Ray cluster to deploy to. Null starts a private Ray on this machine."
    )
    object_store_bytes: int = Field(
        default=128 * 1024 * 1024,
        ge=80 * 1024 * 1024,
        description="Size in bytes of the object store of the private Ray.",
    )
    http_proxy: HttpProxy = Field(
        default="auto",
        description="Proxy between clients and routers. `none`: none, routers listen themselves and share the port; "
        "`serve`: Ray Serve's proxy on every machine; `haproxy`: HAProxy, whose statistics and metrics ports are open "
        "on all interfaces. `auto`: `none` on the private Ray of `baton serve`, `serve` otherwise.",
    )
    startup_timeout_s: float = Field(
        default=600.0, gt=0, description="Time limit in seconds for all workers to become ready."
    )
    cache: CacheSection = Field(default_factory=CacheSection, description="KV cache of every worker.")  # type: ignore[valid-type]
    scheduler: SchedulerSection = Field(  # type: ignore[valid-type]
        default_factory=SchedulerSection, description="Scheduler of every worker."
    )
    gpu: GPUSection = Field(default_factory=GPUSection, description="Settings that matter only for workers on GPUs.")  # type: ignore[valid-type]
    speculative: SpeculativeSection = Field(  # type: ignore[valid-type]
        default_factory=SpeculativeSection, description="Speculative decoding on every worker: docs/speculation.md."
    )
    kv_transfer: TransferSection = Field(  # type: ignore[valid-type]
        default_factory=TransferSection, description="Transfer of KV blocks between workers."
    )
    router: RouterSection = Field(  # type: ignore[valid-type]
        default_factory=RouterSection, description="Limits, timeouts and policies of the router."
    )
    security: SecuritySection = Field(  # type: ignore[valid-type]
        default_factory=SecuritySection, description="Who may call the API: docs/security.md."
    )
    health: HealthSection = Field(
        default_factory=HealthSection, description="Health checks: when a worker counts as hanging."
    )
    slo: SLOSection = Field(
        default_factory=SLOSection,
        description="Latency promised to requests that do not ask for one themselves: docs/promises.md.",
    )
    metrics: MetricsSection = Field(default_factory=MetricsSection, description="Contents of `/metrics`.")
    tracing: TracingSection = Field(  # type: ignore[valid-type]
        default_factory=TracingSection, description="Spans for an OpenTelemetry collector: docs/tracing.md."
    )
    prefill: PoolSection = Field(default_factory=PoolSection, description="Settings of prefill workers only.")
    decode: PoolSection = Field(default_factory=PoolSection, description="Settings of decode workers only.")
    mixed: PoolSection = Field(default_factory=PoolSection, description="Settings of mixed workers only.")

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _named_once(cls, value: object) -> object:
        """Accept a single name as well as a list of names."""
        if value is None:
            return None
        names = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError("it must be a name or a list of names, without empty ones")
        if len(set(names)) < len(names):
            raise ValueError("a name is given twice: leave one out")
        return names if len(names) > 1 else names[0]

    @field_validator("model", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        if value == "":
            raise ValueError("it is empty: name a directory, or leave it out for the built-in model")
        return value

    @field_validator("model")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        if value is None:
            return None
        try:
            return value.expanduser().absolute()
        except RuntimeError as error:
            raise ValueError(f"there is no user {value.parts[0][1:]!r}; your own folder is ~/") from error
