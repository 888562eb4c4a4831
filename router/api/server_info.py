"""GET /server_info: what runs here and how it is configured, for callers that may give orders."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

from fastapi import FastAPI

from kv_transfer.params import PROTOCOL_VERSION
from router.api.admin import check_open
from router.report.status import by_name
from router.service import RouterService

Facts: TypeAlias = Callable[[], Awaitable[Mapping[str, object]]]
"""Supplies facts that a router cannot know itself; never raises."""


async def no_facts() -> Mapping[str, object]:
    """No further facts."""
    return {}


def add_server_info(app: FastAPI, service: RouterService, *, version: str, facts: Facts) -> None:
    """Add the route."""

    @app.get("/server_info")
    async def server_info() -> dict[str, object]:
        """Versions, models, workers and the effective configuration, without secrets."""
        check_open(service)
        return {
            "version": version,
            "protocol_version": PROTOCOL_VERSION,
            "models": list(service.served_models()),
            "router": service.router_id,
            "workers": _workers(service),
            **await facts(),
        }


def _workers(service: RouterService) -> list[dict[str, object]]:
    """The constant properties of each worker; only the id of one that has not introduced itself yet."""
    return [
        {
            "replica_id": replica.replica_id,
            "role": pool.role,
            **(dataclasses.asdict(replica.info) if replica.info is not None else {}),
        }
        for pool in service.role_views
        for replica in by_name(pool)
    ]
