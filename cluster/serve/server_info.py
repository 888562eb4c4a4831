"""What `/server_info` shows: the effective configuration of a cluster without secrets, and the versions it runs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import platform
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from cluster.config.config import BatonConfig
from cluster.config.names import EFFECTIVE, NAMESPACE
from cluster.config.served_model import ServedModel
from router.roles import ROLES

HIDDEN = "(hidden)"
SECRETS = ("api_keys", "admin_keys")
ENGINE_SECTIONS = ("cache", "scheduler", "gpu")
READ_TIMEOUT_S = 5.0
PACKAGES = {"baton": "baton-serve", "ray": "ray", "torch": "torch", "nixl": "nixl"}


def effective(config: BatonConfig, model: ServedModel, own_admin_key: str | None = None) -> dict[str, Any]:
    """All settings with their effective values, as JSON. Settings of engines are listed with each pool.

    Of keys only the number is shown, although only their hashes are known here.
    """
    values = config.model_dump(mode="json", exclude={*ENGINE_SECTIONS, *ROLES, "kv_transfer", "router", "metrics"})
    values["model"] = str(model.path)
    values["served_model_name"] = [model.name, *model.aliases]
    values["kv_transfer"] = dataclasses.asdict(config.transfer_options())
    _, router = config.settings_of_routers(own_admin_key)
    values["router"] = dataclasses.asdict(router)
    for pool in config.pools:
        engine = config.engine_config(pool, model=model.path, num_threads=1)
        values[pool] = {
            **config.pool(pool).model_dump(mode="json", exclude=set(ENGINE_SECTIONS)),
            **{name: dataclasses.asdict(getattr(engine, name)) for name in ENGINE_SECTIONS},
        }
    for name in SECRETS:
        values["security"][name] = [HIDDEN] * len(values["security"][name])
    shown: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return shown


def record_effective(config: BatonConfig, model: ServedModel, own_admin_key: str | None) -> None:
    """Record a configuration, so that every router of this Ray can show it."""
    told = json.dumps(effective(config, model, own_admin_key))
    _internal_kv_put(EFFECTIVE, told, overwrite=True, namespace=NAMESPACE)


def read_effective() -> object:
    """The configuration that was recorded last; None if there is none."""
    value = _internal_kv_get(EFFECTIVE, namespace=NAMESPACE)
    return json.loads(value) if value else None


class ServerFacts:
    """What a router cannot know by itself. Ray's store is read in a separate thread, because that may be slow."""

    def __init__(self, read: Callable[[], object] = read_effective, *, timeout_s: float = READ_TIMEOUT_S) -> None:
        self._read = read
        self._timeout_s = timeout_s
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="baton-facts")

    async def __call__(self) -> Mapping[str, object]:
        """The versions of this process, and the configuration, which is None if Ray's store does not answer."""
        return {"versions": versions(), "config": await self._config()}

    async def _config(self) -> object:
        read = asyncio.get_running_loop().run_in_executor(self._reader, self._read)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await read
        except (TimeoutError, RayError):
            return None


def versions() -> dict[str, str | None]:
    """The installed versions by package name; None for packages that are not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name, distribution in PACKAGES.items():
        try:
            found[name] = version(distribution)
        except PackageNotFoundError:
            found[name] = None
    return found
