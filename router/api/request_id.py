"""X-Request-Id in and out, and the count of answers."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.metrics import RouterMetrics

HEADER = "x-request-id"
_ACCEPTED = re.compile(r"[\x21-\x7e]{1,128}")

_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS"})


class RequestIdMiddleware:
    """Gives every answer the caller's request id, or a new one if there is none or it is unusable.

    The header is left to the server around the application where that one adds it: an answer has it once.
    """

    def __init__(
        self, app: ASGIApp, *, metrics: RouterMetrics, paths: frozenset[str], answers_request_id: bool = True
    ) -> None:
        self._answers_request_id = answers_request_id
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _ACCEPTED.fullmatch(given) else uuid.uuid4().hex
        path = scope["path"] if scope["path"] in self._paths else "other"
        method = scope["method"] if scope["method"] in _METHODS else "other"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                if self._answers_request_id:
                    MutableHeaders(scope=message)[HEADER] = request_id
                self._metrics.answered(path, method, message["status"])
            await send(message)

        scope["baton_request_id"] = request_id
        await self._app(scope, receive, send_with_id)
