"""Amounts of resources that a configuration may ask Ray for."""

from __future__ import annotations

import math

STEP = 0.0001
"""Ray books no finer."""

OTHER_KEYS = {"CPU": "num_cpus", "GPU": "num_gpus"}
NOT_BOOKED = ("memory", "object_store_memory")


def check_custom_resource(name: str, amount: float) -> None:
    """Refuse what Ray would refuse when workers are about to be started.

    Raises:
        ValueError: It has a key of its own, cannot be booked at all, or not in this amount.
    """
    if not name.strip():
        raise ValueError("a custom resource needs a name")
    if name in OTHER_KEYS:
        raise ValueError(f"{name} is no custom resource: use {OTHER_KEYS[name]}")
    if name in NOT_BOOKED:
        raise ValueError(f"{name} is no custom resource, and workers book none of it")
    if amount == 0:
        raise ValueError(f"{name} is 0, which keeps no worker anywhere: give {STEP} or more")
    check_amount(name, amount)


def check_amount(name: str, amount: float) -> None:
    """Refuse amounts that Ray does not count in.

    Raises:
        ValueError: It is not finite, negative, or finer than ``STEP``.
    """
    steps = amount / STEP
    if not math.isfinite(amount) or amount < 0 or abs(steps - round(steps)) > 1e-6 * max(steps, 1.0):
        raise ValueError(f"{name} is {amount}: Ray books 0 or more, in steps of {STEP}")
