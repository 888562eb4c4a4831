"""The record of a deployment in Ray's key-value store: the configuration that Serve was last told to run, and the last
one that came up. The next deployment is compared with it, and a failed update is rolled back to it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from cluster.config.config import BatonConfig
from cluster.config.names import EFFECTIVE, NAMESPACE
from cluster.config.served_model import names_of
from cluster.deploy.claim import Claim

CAME_UP = "deployed"
TOLD = "told"

FIXED = ("model", "served_model_name", "device", "dtype")
"""Keys that must not change in an update: requests move between old and new replicas, and must get the same tokens
under the same model name."""

PLACES = ("address", "host", "port")
"""Keys that only say where to deploy. The address is compared with that of the running Serve, which cannot change."""

NO_CHANGES = (*PLACES, "startup_timeout_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A recorded configuration. If not ``is_whole``, another version wrote it; only the ``FIXED`` keys are known."""

    config: BatonConfig
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What Serve was last told to run, and by which command. Not ``is_taken``: Serve may not have received it.

    model_digest: digest of the model's files at that time; empty if another version wrote the record.
    """

    recorded: Recorded | None
    claim: Claim
    model_digest: str
    is_taken: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployRecord:
    """Everything that is recorded of the cluster on a Ray. It only has a meaning while the application exists."""

    told: Told | None
    came_up: Recorded | None

    @property
    def latest(self) -> BatonConfig | None:
        """The configuration that Serve is bringing up or runs, as far as it is known."""
        configs = self.configs
        if self.told is not None and not self.told.is_taken:
            configs.reverse()
        return configs[0] if configs else None

    @property
    def configs(self) -> list[BatonConfig]:
        """The configurations that may run now: two of them during an update, or after one that nobody waited for."""
        told = self.told.recorded if self.told is not None else None
        return [recorded.config for recorded in (told, self.came_up) if recorded is not None]


def read_deploy_record() -> DeployRecord:
    """Read the record, even if another version of Baton wrote it."""
    values = _read(TOLD)
    told = None
    if isinstance(values, dict):
        told = Told(
            recorded=_recorded(values.get("config")),
            claim=Claim.of_values(values.get("claim", {})),
            model_digest=str(values.get("model_digest", "")),
            is_taken=bool(values.get("is_taken")),
        )
    return DeployRecord(told=told, came_up=_recorded(_read(CAME_UP)))


def record_told(config: BatonConfig, claim: Claim, *, model_digest: str, is_taken: bool) -> None:
    """Record what Serve is about to be told, and later, with ``is_taken``, that it accepted it."""
    content = {
        "config": config.model_dump(mode="json", exclude_unset=True),
        "claim": dataclasses.asdict(claim),
        "model_digest": model_digest,
        "is_taken": is_taken,
    }
    _internal_kv_put(TOLD, json.dumps(content), overwrite=True, namespace=NAMESPACE)


def record_came_up(config: BatonConfig) -> None:
    """Record a configuration that came up."""
    _internal_kv_put(CAME_UP, config.model_dump_json(exclude_unset=True), overwrite=True, namespace=NAMESPACE)


def forget_deployed() -> None:
    """Delete the record, because nothing is deployed any more."""
    for key in (TOLD, CAME_UP, EFFECTIVE):
        _internal_kv_del(key, namespace=NAMESPACE)


def changed_keys(old: BatonConfig, new: BatonConfig) -> list[str]:
    """The top-level keys whose values differ, without those that only say where to deploy."""
    return [
        name for name in BatonConfig.model_fields if name not in NO_CHANGES and getattr(old, name) != getattr(new, name)
    ]


def forbidden_changes(old: BatonConfig, new: BatonConfig) -> list[str]:
    """Changes that are not allowed, as ``key: old -> new``. Names may be added or removed while the first one stays."""
    changed = set(changed_keys(old, new))
    if names_of(old)[:1] == names_of(new)[:1]:
        changed.discard("served_model_name")
    return [f"{name}: {_told(getattr(old, name))} -> {_told(getattr(new, name))}" for name in FIXED if name in changed]


def _told(value: object) -> str:
    """A value as written in a configuration file."""
    return "null" if value is None else str(value)


def _read(key: str) -> Any:
    value = _internal_kv_get(key, namespace=NAMESPACE)
    return json.loads(value) if value else None


def _recorded(values: Mapping[str, Any] | None) -> Recorded | None:
    """The configuration; or only its ``FIXED`` keys, if another version wrote settings that this one does not know."""
    if not values:
        return None
    fixed = {name: values[name] for name in FIXED if name in values}
    for keys, is_whole in ((values, True), (fixed, False)):
        try:
            return Recorded(config=BatonConfig.model_validate(keys), is_whole=is_whole)
        except ValueError:
            continue
    return None
