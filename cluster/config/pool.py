"""The settings that may differ between the pools of a cluster."""

from __future__ import annotations

import math

from pydantic import Field, ValidationInfo, field_validator

from cluster.config.config_section import Section
from cluster.config.scaling import ScalingSection
from cluster.config.settings_sections import CacheSection, GPUSection, SchedulerSection

STEP = 0.0001
"""The finest amount of a resource that Ray accounts for."""

OTHER_KEYS = {"CPU": "num_cpus", "GPU": "num_gpus"}
NOT_BOOKED = ("memory", "object_store_memory")

MAX_PER_NODE = 100
"""Serve's own limit."""


def check_custom_resource(name: str, amount: float) -> None:
    """Refuse a custom resource that Ray would only refuse when workers are started.

    Raises:
        ValueError: The resource has its own key, cannot be requested, or not in this amount.
    """
    if not name.strip():
        raise ValueError("a custom resource needs a name")
    if name in OTHER_KEYS:
        raise ValueError(f"{name} is not a custom resource: use {OTHER_KEYS[name]}")
    if name in NOT_BOOKED:
        raise ValueError(f"{name} is not a custom resource, and workers do not reserve it: leave it out")
    if amount == 0:
        raise ValueError(f"{name} is 0, which has no effect: give {STEP} or more, or leave it out")
    check_amount(name, amount)


def check_amount(name: str, amount: float) -> None:
    """Refuse amounts of a resource that Ray cannot account for.

    Raises:
        ValueError: The amount is not finite, negative, or finer than ``STEP``.
    """
    steps = amount / STEP
    if not math.isfinite(amount) or amount < 0 or abs(steps - round(steps)) > 1e-6 * max(steps, 1.0):
        raise ValueError(f"{name} is {amount}: give 0 or more, in steps of {STEP}, as Ray requires")


class PoolSection(Section):
    """Settings of a single pool. All are optional."""

    num_threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads per worker. Null shares the machine's cores evenly among its workers.",
    )
    num_cpus: float | None = Field(
        default=None, ge=0, description="CPUs that Ray reserves per worker. Null reserves a small fraction."
    )
    num_gpus: float | None = Field(
        default=None,
        ge=0,
        description="GPUs that Ray reserves per worker. Null reserves what the device needs: one, or an even part if "
        "the machine has too few ([gpu.md](gpu.md)).",
    )
    resources: dict[str, float] = Field(
        default_factory=dict,
        description="Custom Ray resources that each worker takes. For example, `{baton_prefill: 0.001}` keeps a pool "
        "on machines whose Ray was started with `baton_prefill`.",
    )
    max_per_node: int | None = Field(
        default=None,
        ge=1,
        le=MAX_PER_NODE,
        description="Most workers of this pool on one machine, which limits how many are lost with it. A replacement "
        "then waits for a machine with fewer. Null: Ray spreads workers as well as it can.",
    )
    cache: CacheSection = Field(default_factory=CacheSection, description="Overrides `cache` for this pool.")  # type: ignore[valid-type]
    scheduler: SchedulerSection = Field(  # type: ignore[valid-type]
        default_factory=SchedulerSection, description="Overrides `scheduler` for this pool."
    )
    gpu: GPUSection = Field(default_factory=GPUSection, description="Overrides `gpu` for this pool.")  # type: ignore[valid-type]
    scaling: ScalingSection | None = Field(
        default=None, description="Autoscaling of the pool. Null keeps its number of workers fixed."
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
