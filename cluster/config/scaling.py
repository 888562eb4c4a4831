"""When a pool grows and shrinks: the settings."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from cluster.config.config_section import Section
from engine.contract.messages import LoadReport
from engine.contract.role import LoadMeasure, Role

MAX_RATIO = 4.0
MAX_REPLICAS = 10_000
"""Of anything: a slip of the keyboard would keep the arithmetic busy for hours."""


class ScalingSection(Section):
    """How a pool follows its load. Without it a pool keeps the number of replicas that it was given."""

    min_replicas: int = Field(default=1, ge=1, description="Fewest workers.")
    max_replicas: int = Field(ge=1, le=MAX_REPLICAS, description="Most workers.")
    target_queued_tokens: int = Field(
        default=4096, ge=1, description="Prompt tokens that should wait at each prefill worker."
    )
    target_kv_usage: float = Field(
        default=0.6, gt=0, le=1, description="Share of the KV blocks that should be in use at each decode worker."
    )
    look_back_s: float = Field(default=15.0, gt=10, description="Time over which the load is averaged.")
    up_delay_s: float = Field(default=5.0, ge=0, description="How long it must be too high before workers are added.")
    down_delay_s: float = Field(
        default=120.0, ge=0, description="How long it must be too low before workers are drained."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) is more than max_replicas ({self.max_replicas})")
        return self

    def first(self, num_replicas: int) -> int:
        """How many workers to begin with where so many were asked for."""
        return min(max(num_replicas, self.min_replicas), self.max_replicas)

    def load_of(self, role: Role, load: LoadReport) -> float:
        """A worker's load as a share of its target, bounded: one stuck queue must not ask for the whole cluster."""
        targets = {
            LoadMeasure.QUEUED_TOKENS: self.target_queued_tokens,
            LoadMeasure.KV_USAGE: self.target_kv_usage,
        }
        return min(role.measure.of(load) / targets[role.measure], MAX_RATIO)
