"""Autoscaling policies: a pool follows its own load (prefill: waiting prompts, decode: KV in use), or the orders of a
router, which predicts how many workers the promises need.

Serve's autoscaler asks each replica for its load, or for the last order that it got. It applies its own limits and
delays, and stops replicas by draining them.
"""

from __future__ import annotations

import math
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from cluster.config.scaling import ScalingSection

LOAD = "load"
"""Name of the metric with a replica's load as a share of its target: 1 means just right."""

ORDERED = "ordered"
ORDERED_AT = "ordered_at_s"
"""Names of the metrics with the last order that a replica got: how many replicas there should be, and when."""

POLICY = "cluster.serve.autoscale:wanted_replicas"
ORDERS_POLICY = "cluster.serve.autoscale:ordered_replicas"


def autoscaling_config(scaling: ScalingSection, *, num_replicas: int) -> AutoscalingConfig:
    """The settings for Serve's autoscaler, which begins with ``num_replicas``."""
    if scaling.by == "promise":  # no delays: the router has already waited as long as it should
        return AutoscalingConfig(
            min_replicas=scaling.min_replicas,
            max_replicas=scaling.max_replicas,
            initial_replicas=scaling.first(num_replicas),
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            policy=AutoscalingPolicy(policy_function=ORDERS_POLICY),  # type: ignore[no-untyped-call]
        )
    return AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        initial_replicas=scaling.first(num_replicas),
        look_back_period_s=scaling.look_back_s,
        upscale_delay_s=scaling.up_delay_s,
        downscale_delay_s=scaling.down_delay_s,
        policy=AutoscalingPolicy(policy_function=POLICY),  # type: ignore[no-untyped-call]
    )


def wanted_replicas(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """The number of replicas that the sum of all loads needs. Serve calls this in its controller.

    Returns:
        The number, before Serve's limits and delays; and an empty policy state.
    """
    loads = (context.aggregated_metrics or {}).get(LOAD, {})
    if not loads:
        return context.target_num_replicas, {}
    return max(math.ceil(sum(loads.values()) - 1e-9), 1), {}


def ordered_replicas(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """The number of replicas in the newest order that any replica got. Serve calls this in its controller.

    Returns:
        The number, before Serve's limits; and an empty policy state.
    """
    told = context.raw_metrics or {}
    newest = {replica: series[-1].value for replica, series in told.get(ORDERED_AT, {}).items() if series}
    numbers = {replica: series[-1].value for replica, series in told.get(ORDERED, {}).items() if series}
    known = [replica for replica in newest if replica in numbers]
    if not known:
        return context.target_num_replicas, {}
    return round(numbers[max(known, key=newest.__getitem__)]), {}
