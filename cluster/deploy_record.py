"""What was deployed last, and how, kept in Ray's key-value store: to compare with, and to go back to."""

from __future__ import annotations

import json

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from cluster.config import BatonConfig
from cluster.start_report import NAMESPACE

KEY = "deployed"
SERVING = "serving"

FIXED = ("model", "served_model_name", "device", "dtype", "host", "port")
"""What cannot change while requests move between old and new replicas: the same tokens, at the same address."""


def read_deployed() -> BatonConfig | None:
    """The configuration that was deployed last; None where nothing was, or by a version with other settings."""
    value = _internal_kv_get(KEY, namespace=NAMESPACE)
    if not value:
        return None
    try:
        return BatonConfig.model_validate(json.loads(value))
    except ValueError:
        return None


def record_deployed(config: BatonConfig) -> None:
    """Remember a configuration that came up."""
    _internal_kv_put(KEY, config.model_dump_json(exclude_unset=True), overwrite=True, namespace=NAMESPACE)
    _internal_kv_del(SERVING, namespace=NAMESPACE)


def record_serving() -> None:
    """Remember that a `baton serve` has the cluster, and takes it off when it ends."""
    _internal_kv_put(SERVING, "1", overwrite=True, namespace=NAMESPACE)


def is_serving() -> bool:
    """True when the cluster is that of a `baton serve`, if there is any."""
    return bool(_internal_kv_get(SERVING, namespace=NAMESPACE))


def forget_deployed() -> None:
    """Nothing is deployed any more."""
    for key in (KEY, SERVING):
        _internal_kv_del(key, namespace=NAMESPACE)


def changed_keys(old: BatonConfig, new: BatonConfig) -> list[str]:
    """The top-level keys whose values differ, without those that only say where to deploy."""
    return [
        name
        for name in BatonConfig.model_fields
        if name not in ("address", "startup_timeout_s") and getattr(old, name) != getattr(new, name)
    ]


def forbidden_changes(old: BatonConfig, new: BatonConfig) -> list[str]:
    """What differs and must not, as ``key: old -> new``."""
    return [f"{name}: {getattr(old, name)} -> {getattr(new, name)}" for name in FIXED if name in changed_keys(old, new)]
