"""POST /admin/...: orders to the workers; the door asks for an admin key where there are keys."""

from __future__ import annotations

import dataclasses
from typing import Literal

from fastapi import FastAPI, Request
from pydantic import Field

from kv_transfer.errors import InvalidOptionError
from kv_transfer.fault_options import FaultOptions, ScheduledFault
from router.api.generate_body import StrictBody
from router.api.openapi import body_schema
from router.api.request_body import read_body
from router.errors import AdminClosedError, InvalidRequestError
from router.service import RouterService


class DrainBody(StrictBody):
    """Which worker: its id, or how it begins."""

    replica: str


class FaultsBody(StrictBody):
    """The faults from now on, by the names of ``kv_transfer.faults``; none heals all."""

    role: Literal["prefill", "decode"] | None = None
    faults: dict[str, float] = Field(default_factory=dict)
    schedule: list[ScheduledFault] = Field(default_factory=list)


def add_admin(app: FastAPI, service: RouterService) -> None:
    """Add the routes."""

    @app.post("/admin/drain", openapi_extra=body_schema(DrainBody))
    async def drain(request: Request) -> dict[str, object]:
        """Have a worker let its requests go, and exit. Answers at once."""
        check_open(service)
        async with read_body(request, DrainBody, settings=service.settings, room=service.body_room) as body:
            return {"draining": await service.administration.drain(body.replica)}

    @app.post("/admin/faults", openapi_extra=body_schema(FaultsBody))
    async def set_faults(request: Request) -> dict[str, object]:
        """Have the connectors suffer these faults, and no others."""
        check_open(service)
        async with read_body(request, FaultsBody, settings=service.settings, room=service.body_room) as body:
            options = fault_options(body)
            return {"replicas": await service.administration.set_faults(options, role=body.role)}


def check_open(service: RouterService) -> None:
    """Refuse orders where anybody in the network could give them.

    Raises:
        AdminClosedError: The API is open to others and asks for no key.
    """
    if not service.settings.admin_api:
        raise AdminClosedError


def fault_options(body: FaultsBody) -> FaultOptions:
    """The options as the connectors know them.

    Raises:
        InvalidRequestError: There is no such fault, or its value is not allowed.
    """
    known = {item.name for item in dataclasses.fields(FaultOptions)} - {"schedule"}
    for name in body.faults:
        if name not in known:
            raise InvalidRequestError(
                f"there is no fault {name!r}; known are {', '.join(sorted(known))}",
                code="invalid_parameter",
                param="faults",
            )
    values = {name: int(value) if name == "seed" else value for name, value in body.faults.items()}
    try:
        return FaultOptions(**values, schedule=tuple(body.schedule))  # type: ignore[arg-type]  # the names are checked
    except InvalidOptionError as error:
        raise InvalidRequestError(str(error), code="invalid_parameter", param="faults") from error
