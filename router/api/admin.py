"""Orders to the workers, POST /admin/... and /reset_prefix_cache: they always ask for an admin key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, ConfigDict, Field, ValidationError

from kv_transfer.errors import InvalidOptionError
from kv_transfer.fault_options import FaultOptions, ScheduledFault
from router.administration import ResetAnswer
from router.api.bodies.strict_body import StrictBody
from router.api.errors import error_body, invalid_body
from router.api.http.request_body import read_body
from router.api.openapi import body_schema, query_schema
from router.errors import AdminClosedError, BodyNotJsonError, InvalidRequestError
from router.live.timeline import Happening
from router.roles import ROLES
from router.service import RouterService


class OrderBody(StrictBody):
    """An order has no field that is not known, not even as null."""

    model_config = ConfigDict(extra="forbid")


def _known_role(name: str) -> str:
    if name not in ROLES:
        raise ValueError(f"there is no such role; known roles: {', '.join(ROLES)}")
    return name


class DrainBody(OrderBody):
    """The worker, by its id or how that begins."""

    replica: str


class MoveBody(OrderBody):
    """The worker to move requests from, and in ``to`` the one to move them to, by their ids or how these begin.

    Without ``to`` the policy chooses. ``num_streams`` of the router that gets the order are moved.
    """

    replica: str
    to: str | None = None
    num_streams: int = Field(default=1, ge=1)


class LeanBody(OrderBody):
    """The worker, by its id or how that begins, and the role whose work it should prefer."""

    replica: str
    role: Annotated[str, AfterValidator(_known_role), Field(json_schema_extra={"enum": list(ROLES)})]


class FaultsBody(OrderBody):
    """The faults to inject from now on, named as in ``kv_transfer.faults``. If there are none, all faults end.

    They are injected into the workers of a ``role``, or into one ``replica``, named by its id or how that begins; else
    into all.
    """

    replica: str | None = None
    role: Annotated[str, AfterValidator(_known_role), Field(json_schema_extra={"enum": list(ROLES)})] | None = None
    faults: dict[str, float] = Field(default_factory=dict)
    schedule: list[ScheduledFault] = Field(default_factory=list)


class ResetBody(StrictBody):
    """How to drop the prefix caches. ``reset_running_requests`` is vLLM's name of ``preempt_running``. Host tiers,
    which vLLM calls external, are always dropped too.
    """

    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = {"reset_external": (None, True)}

    preempt_running: bool | None = None
    reset_running_requests: bool | None = None


def add_admin(app: FastAPI, service: RouterService) -> None:
    """Add the routes."""

    @app.post("/admin/drain", openapi_extra=body_schema(DrainBody))
    async def drain(request: Request) -> dict[str, object]:
        """Drain a worker: its requests finish or move to others, then it exits. Answers at once."""
        check_open(service)
        async with read_body(request, DrainBody, settings=service.settings, room=service.body_room) as body:
            return {"draining": await service.administration.drain(body.replica)}

    @app.post("/admin/move", openapi_extra=body_schema(MoveBody))
    async def move(request: Request) -> dict[str, object]:
        """Move running requests with their KV from a worker to another. Answers at once."""
        check_open(service)
        async with read_body(request, MoveBody, settings=service.settings, room=service.body_room) as body:
            answer = await service.administration.move(body.replica, body.to, num_streams=body.num_streams)
            return {"replica": answer.source, "to": answer.target, "num_streams": answer.num_streams}

    @app.post("/admin/lean", openapi_extra=body_schema(LeanBody))
    async def lean(request: Request) -> dict[str, object]:
        """Make a worker prefer the work of a role (with elastic roles). Its running requests continue."""
        check_open(service)
        async with read_body(request, LeanBody, settings=service.settings, room=service.body_room) as body:
            answer = await service.administration.lean(body.replica, body.role)
            return {"replica": answer.replica_id, "role": body.role, "before": answer.before}

    @app.post("/admin/faults", openapi_extra=body_schema(FaultsBody))
    async def set_faults(request: Request) -> dict[str, object]:
        """Inject these faults, and no others, into connectors."""
        check_open(service)
        async with read_body(request, FaultsBody, settings=service.settings, room=service.body_room) as body:
            options = fault_options(body)
            replicas = await service.administration.set_faults(options, role=body.role, name=body.replica)
            service.live.tell(Happening(kind="fault", text=faults_text(body), count=len(replicas)))
            return {"replicas": replicas}

    @app.post("/reset_prefix_cache", openapi_extra=body_schema(ResetBody, is_required=False) | query_schema(ResetBody))
    async def reset_prefix_cache(request: Request) -> JSONResponse:
        """Drop the prefix cache of every worker. As in vLLM, parameters may be in the URL, without a body."""
        check_open(service)
        asked = [_reset_query(request)]
        if _has_body(request):
            async with read_body(request, ResetBody, settings=service.settings, room=service.body_room) as body:
                asked.append(body)
        elif "origin" in request.headers:  # from a web page: browsers send these anywhere without asking
            raise BodyNotJsonError(media_type="")
        preempt_running = any(body.preempt_running or body.reset_running_requests for body in asked)
        answers = await service.administration.reset_prefix_cache(preempt_running=preempt_running)
        return _reset_response(answers)


def _has_body(request: Request) -> bool:
    headers = request.headers
    return headers.get("content-length", "0") != "0" or "content-type" in headers or "transfer-encoding" in headers


def _reset_query(request: Request) -> ResetBody:
    """The body from the URL's parameters."""
    words = {"true": True, "1": True, "false": False, "0": False}
    try:
        return ResetBody.model_validate({name: words.get(text, text) for name, text in request.query_params.items()})
    except ValidationError as error:
        raise invalid_body(error) from error


def _reset_response(answers: list[ResetAnswer]) -> JSONResponse:
    """What each worker dropped; or an error that names the workers that dropped nothing."""
    content: dict[str, Any] = {"success": True, "workers": [_reset_row(answer) for answer in answers]}
    failed = [answer for answer in answers if answer.dropped is None]
    if not failed:
        return JSONResponse(content)
    is_busy = all(answer.is_busy for answer in failed)
    status = HTTPStatus.CONFLICT if is_busy else HTTPStatus.SERVICE_UNAVAILABLE
    reasons = "; ".join(f"{answer.role} worker {answer.replica_id}: {answer.reason}" for answer in failed)
    error = error_body(
        f"{len(failed)} of {len(answers)} workers did not drop their prefix cache: {reasons}",
        kind="conflict_error" if is_busy else "service_unavailable_error",
        code="prefix_cache_in_use" if is_busy else "worker_unavailable",
        param="preempt_running" if is_busy else None,
    )
    headers = None if is_busy else {"Retry-After": "1"}
    return JSONResponse({**content, "success": False, **error}, status_code=status, headers=headers)


def _reset_row(answer: ResetAnswer) -> dict[str, object]:
    row: dict[str, object] = {"replica_id": answer.replica_id, "role": answer.role}
    if answer.dropped is None:
        return {**row, "error": answer.reason}
    return {
        **row,
        "dropped_blocks": answer.dropped.num_blocks,
        "dropped_host_blocks": answer.dropped.num_host_blocks,
        "preempted_requests": answer.dropped.num_preempted,
    }


def check_open(service: RouterService) -> None:
    """Refuse orders if anybody in the network could give them.

    Raises:
        AdminClosedError: The API is reachable by others and needs no key.
    """
    if not service.settings.admin_api:
        raise AdminClosedError


def faults_text(body: FaultsBody) -> str:
    """The faults that an operator ordered, in words."""
    asked = [f"{name} {value:g}" for name, value in body.faults.items()]
    asked += [f"{item.fault} at occasion {item.nth}" for item in body.schedule]
    who = f"{body.role} workers" if body.role is not None else "all workers"
    who, get = (who, "get") if body.replica is None else (f"worker {body.replica}", "gets")
    return f"{who} {get} injected faults: {', '.join(asked)}" if asked else f"{who} {get} no more injected faults"


def fault_options(body: FaultsBody) -> FaultOptions:
    """The connectors' options for these faults.

    Raises:
        InvalidRequestError: There is no such fault, or its value is not allowed.
    """
    known = {item.name for item in dataclasses.fields(FaultOptions)} - {"schedule"}
    for name in body.faults:
        if name not in known:
            raise InvalidRequestError(
                f"there is no fault {name!r}; known faults: {', '.join(sorted(known))}",
                code="invalid_parameter",
                param="faults",
            )
    values = {name: int(value) if name == "seed" else value for name, value in body.faults.items()}
    try:
        return FaultOptions(**values, schedule=tuple(body.schedule))  # type: ignore[arg-type]  # the names are checked
    except InvalidOptionError as error:
        raise InvalidRequestError(str(error), code="invalid_parameter", param="faults") from error
