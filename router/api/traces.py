"""/v1/requests: the traces of the last requests (docs/tracing.md)."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Query, Request, Response
from starlette.requests import ClientDisconnect

from router.api.errors import status_of
from router.api.http.direct_routes import Endpoint
from router.api.http.guard import is_admin, owner_of
from router.api.http.headers import caller_context
from router.api.request_id import RECEIVED_KEY, SCOPE_KEY
from router.errors import InternalError, RouterError
from router.service import RouterService
from router.trace.origin import NO_CONTEXT, Origin, Viewer

PATH = "/v1/requests"
MAX_NUM_LISTED = 500


def add_traces(app: FastAPI, service: RouterService) -> None:
    """Add the routes."""

    @app.get(PATH)
    async def list_requests(request: Request, limit: int = Query(20, ge=1, le=MAX_NUM_LISTED)) -> dict[str, Any]:
        """The latest traced requests, newest first: those of the caller's key, or all with an admin key."""
        return {"object": "list", "data": await service.traces.last(limit, viewer=_viewer(request))}

    @app.get(PATH + "/{request_id:path}/trace")
    async def get_trace(request: Request, request_id: str) -> Response:
        """Trace a request: where it waited, which workers it went to and why, and when its tokens arrived."""
        found = await service.traces.find(request_id, viewer=_viewer(request))
        return Response(found, media_type="application/json")


def tracing_refusals(endpoint: Endpoint, service: RouterService) -> Endpoint:
    """Wrap an endpoint, so that requests which it refuses before anything runs leave a trace, too."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except (ClientDisconnect, OSError):
            raise
        except Exception as error:
            told = error if isinstance(error, RouterError) else InternalError()
            origin = origin_of(request, service)
            service.traces.recorder.refuse(origin, status=status_of(told)[0], code=told.code, reason=told.message)
            raise

    return answer


def origin_of(request: Request, service: RouterService, *, answer_id: str = "", num_choices: int = 1) -> Origin:
    """The ids and the owner under which a request's trace is kept."""
    makes_spans = service.traces.recorder.makes_spans
    return Origin(
        request_id=request.scope.get(SCOPE_KEY, ""),
        answer_id=answer_id,
        owner=owner_of(request.scope),
        endpoint=request.scope["path"],
        received_s=request.scope.get(RECEIVED_KEY, time.perf_counter()),
        num_choices=num_choices,
        context=caller_context(request) if makes_spans else NO_CONTEXT,
    )


def _viewer(request: Request) -> Viewer:
    return Viewer(owner=owner_of(request.scope), is_admin=is_admin(request.scope))
