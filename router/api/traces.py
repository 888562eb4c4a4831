"""/v1/requests: what became of the last requests, and of each of them part by part (docs/tracing.md)."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Query, Request, Response

from router.api.http.guard import is_admin, owner_of
from router.service import RouterService
from router.trace.origin import Viewer

PATH = "/v1/requests"
MAX_NUM_LISTED = 500


def add_traces(app: FastAPI, service: RouterService) -> None:
    """Add the routes."""

    @app.get(PATH)
    async def list_requests(request: Request, limit: int = Query(20, ge=1, le=MAX_NUM_LISTED)) -> dict[str, Any]:
        """The last requests that are traced, newest first: one's own, or all with an admin key."""
        return {"object": "list", "data": await service.traces.last(limit, viewer=_viewer(request))}

    @app.get(PATH + "/{request_id:path}/trace")
    async def get_trace(request: Request, request_id: str) -> Response:
        """Where a request waited, where it went and why, and how its tokens came."""
        found = await service.traces.find(request_id, viewer=_viewer(request))
        return Response(found, media_type="application/json")


def _viewer(request: Request) -> Viewer:
    return Viewer(owner=owner_of(request.scope), is_admin=is_admin(request.scope))
