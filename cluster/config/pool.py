"""What differs between the pools of a cluster, in the configuration."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator

from cluster.config.booking import check_amount, check_custom_resource
from cluster.config.config_section import Section
from cluster.config.scaling import ScalingSection
from cluster.config.settings_sections import CacheSection, GPUSection, SchedulerSection

MAX_PER_NODE = 100
"""Serve's own limit."""


class PoolSection(Section):
    """What differs between pools; everything is optional."""

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
        le=MAX_PER_NODE,
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
