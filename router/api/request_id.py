"""Reads and writes X-Request-Id, and counts answers."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.report.metrics import RouterMetrics

HEADER = "x-request-id"
SCOPE_KEY = "baton_request_id"
RECEIVED_KEY = "baton_received_s"
"""Scope key: when the request came, by ``time.perf_counter``."""

BEGUN_KEY = "baton_answer_begun"
"""Scope key: set once the answer has begun."""

MAX_CHARACTERS = 128
_ACCEPTED = re.compile(rf"[\x21-\x7e]{{1,{MAX_CHARACTERS}}}")

_METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS"})


def is_request_id(text: str) -> bool:
    """True if a caller's id is safe to use, since it goes into headers and logs."""
    return _ACCEPTED.fullmatch(text) is not None


def usable_request_id(given: Sequence[bytes]) -> str:
    """The caller's id if it sent exactly one, of up to 128 visible ASCII characters; otherwise a new one."""
    if len(given) == 1 and is_request_id(text := given[0].decode("latin-1")):
        return text
    return uuid.uuid4().hex


class RequestIdMiddleware:
    """Gives every answer the caller's request id, or a new one if that is missing or unusable.

    A body may name another id, which then replaces it in the scope.

    If the server around the application adds the header, this middleware does not, so that an answer has it once.
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
        request_id = usable_request_id([value for name, value in scope["headers"] if name == HEADER.encode()])
        path = self._label(scope["path"])
        method = scope["method"] if scope["method"] in _METHODS else "other"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                if self._answers_request_id:
                    MutableHeaders(scope=message)[HEADER] = scope[SCOPE_KEY]
                scope[BEGUN_KEY] = True
                self._metrics.answered(path, method, message["status"])
            await send(message)

        scope[SCOPE_KEY] = request_id
        scope[RECEIVED_KEY] = time.perf_counter()
        await self._app(scope, receive, send_with_id)

    def _label(self, path: str) -> str:
        """The path's label in metrics: paths that differ only in an id share one label."""
        if path in self._paths:
            return path
        start = path[: path.find("/", len("/v1/x")) + 1]
        return f"{start}{{id}}" if f"{start}{{id}}" in self._paths else "other"
