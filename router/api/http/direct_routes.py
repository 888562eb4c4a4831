"""The fast path for frequent requests: from the path directly to the endpoint, past the framework's routing."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.errors import error_response
from router.api.http.patience import PatientSend
from router.errors import RouterError

logger = logging.getLogger(f"baton.{__name__}")

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


class DirectRoutes:
    """Answers POST on the given paths itself, and passes everything else on to the application.

    The application also has these endpoints, for the OpenAPI document and for answers to other methods. Its routing
    and dependency resolution take 0.2 ms a request, and the framework's wrappers around ``send`` take a tenth of what a
    token costs.
    """

    def __init__(self, app: ASGIApp, *, endpoints: Mapping[str, Endpoint], write_timeout_s: float) -> None:
        self._app = app
        self._endpoints = endpoints
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if is_post else None
        if endpoint is None:
            await self._pass_on(scope, receive, send)
            return
        try:
            response = await endpoint(Request(scope, receive))
        except RouterError as error:
            response = error_response(error)
        await response(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application; drop a client that does not read, as these answers can be long, too."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        patient = PatientSend(send, timeout_s=self._write_timeout_s)
        try:
            await self._app(scope, receive, patient)
        except (OSError, ClientDisconnect):
            if not patient.gave_up:
                raise
            logger.info("client does not read: path=%r", scope["path"][:80])
