"""When a pool grows and shrinks: the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from cluster.config.config_section import Section
from engine.contract.messages import LoadReport
from engine.contract.promise import Promise
from engine.contract.role import LoadMeasure, Role, Work
from router.roles import ROLES, groups_of_roles
from router.scaling_rules import PoolBounds, ScalingRules
from router.settings import RolesMode

ScalingBy = Literal["load", "promise"]

MAX_RATIO = 4.0
MAX_REPLICAS = 10_000
"""Limit for every number of replicas: a typing error would keep the arithmetic busy for hours."""


_OF_LOAD = ("target_queued_tokens", "target_kv_usage", "look_back_s", "up_delay_s")
_OF_PROMISE = ("target", "window_s", "start_s")
"""Keys that apply only to one value of ``by``."""


class ScalingSection(Section):
    """How a pool follows its load. Without it a pool keeps the number of replicas that it was given."""

    by: ScalingBy = Field(
        default="load",
        description="What the number of workers follows. `load`: the measured load, towards `target_queued_tokens` or "
        "`target_kv_usage`. `promise`: as many workers as are predicted to keep what `slo` promises "
        "([promises.md](promises.md)).",
    )
    min_replicas: int = Field(default=1, ge=1, description="Smallest number of workers.")
    max_replicas: int = Field(
        ge=1,
        le=MAX_REPLICAS,
        description="Largest number of workers. On a single GPU, each worker's part of the memory is sized so that "
        "this many fit.",
    )
    target_queued_tokens: int = Field(
        default=4096,
        ge=1,
        description="With `by: load`, the number of waiting prompt tokens per prefill worker to aim for. Lower values "
        "add workers sooner.",
    )
    target_kv_usage: float = Field(
        default=0.6,
        gt=0,
        le=1,
        description="With `by: load`, the share of KV blocks in use per decode worker to aim for, up to 1. Lower "
        "values add workers sooner.",
    )
    look_back_s: float = Field(
        default=15.0, gt=10, description="With `by: load`, seconds over which the load is averaged; more than 10."
    )
    up_delay_s: float = Field(
        default=5.0,
        ge=0,
        description="With `by: load`, seconds for which the load must be too high before workers are added.",
    )
    down_delay_s: float = Field(
        default=120.0,
        ge=0,
        description="Seconds for which fewer workers must have been enough before some are drained.",
    )
    target: float = Field(
        default=0.99,
        gt=0,
        le=1,
        description="With `by: promise`, the share of requests, up to 1, whose promise should be kept. Requests that "
        "no number of workers could serve in time do not count.",
    )
    window_s: float = Field(
        default=60.0,
        ge=10,
        le=600,
        description="With `by: promise`, seconds of recent traffic that are assumed to repeat.",
    )
    start_s: float = Field(
        default=30.0,
        gt=0,
        description="With `by: promise`, the assumed start time of a worker in seconds, until one has been observed.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) is more than max_replicas ({self.max_replicas})")
        return self

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        for name in _OF_PROMISE if self.by == "load" else _OF_LOAD:
            if name in self.model_fields_set:
                other = "promise" if self.by == "load" else "load"
                raise ValueError(f"{name} only applies to `by: {other}`, but by is {self.by!r}: leave it out")
        return self

    def first(self, num_replicas: int) -> int:
        """The number of workers to start with: ``num_replicas``, kept within the limits."""
        return min(max(num_replicas, self.min_replicas), self.max_replicas)

    def load_of(self, role: Role, load: LoadReport) -> float:
        """A worker's load as a share of its target. It is capped, so that one stuck queue cannot claim the cluster."""
        targets = {
            LoadMeasure.QUEUED_TOKENS: self.target_queued_tokens,
            LoadMeasure.KV_USAGE: self.target_kv_usage,
        }
        return min(role.measure.of(load) / targets[role.measure], MAX_RATIO)


def promise_rules(
    sections: Mapping[str, ScalingSection | None], *, roles: RolesMode, promise: Promise
) -> ScalingRules | None:
    """The rules of the pools that follow the promises; None if no pool does.

    Raises:
        ValueError: There is no promise that a pool could follow, or pools contradict each other.
    """
    following = {role: section for role, section in sections.items() if section is not None and section.by == "promise"}
    if not following:
        return None
    is_elastic = roles == "elastic"
    for group in groups_of_roles(sections, is_elastic=is_elastic):
        _check_group([role.name for role in group], sections, "with roles elastic all" if is_elastic else "their")
    for role in following:
        _check_promise(role, is_elastic=is_elastic, promise=promise)
    (first, section), *others = following.items()
    for name in (*_OF_PROMISE, "down_delay_s"):
        for role, other in others:
            if getattr(other, name) != getattr(section, name):
                raise ValueError(
                    f"{first}.scaling.{name} ({getattr(section, name):g}) and {role}.scaling.{name} "
                    f"({getattr(other, name):g}) differ: with `by: promise` set them to the same value for all pools"
                )
    return ScalingRules(
        pools={role: PoolBounds(least=item.min_replicas, most=item.max_replicas) for role, item in following.items()},
        target=section.target,
        window_s=section.window_s,
        hold_s=section.down_delay_s,
        start_s=section.start_s,
    )


def _check_group(names: Sequence[str], sections: Mapping[str, ScalingSection | None], whose: str) -> None:
    """Refuse pools that are sized together, but by different rules."""
    by = {name: section.by for name in names if (section := sections[name]) is not None}
    for other in by if "promise" in by.values() else ():
        if by[other] == "load":
            first = next(name for name in by if by[name] == "promise")
            raise ValueError(
                f"{other}.scaling is by load and {first}.scaling by promise, but {whose} workers are sized together: "
                "set `by: promise` for both, or leave out one pool's scaling"
            )


def _check_promise(role: str, *, is_elastic: bool, promise: Promise) -> None:
    """Refuse a pool that is to follow a promise which was not made."""
    if promise.ttft_ms is None and promise.itl_ms is None:
        raise ValueError(f"{role}.scaling is by promise, but no latency is promised: set slo.ttft_ms and slo.itl_ms")
    if is_elastic:
        return
    promised = {Work.PROMPT: ("ttft_ms", promise.ttft_ms), Work.STREAM: ("itl_ms", promise.itl_ms)}
    found = [promised[work] for work in ROLES[role].prefers]
    if all(bound is None for _, bound in found):
        name = found[0][0]
        raise ValueError(
            f"{role}.scaling is by promise, but slo.{name}, which its workers should keep, is not set: set it"
        )
