"""The answer to a request that fails with an unexpected error before its answer begins."""

from __future__ import annotations

import logging

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.errors import error_response
from router.api.request_id import BEGUN_KEY, SCOPE_KEY
from router.errors import InternalError

logger = logging.getLogger(f"baton.{__name__}")

MAX_SHOWN_CHARACTERS = 80


class InternalErrorMiddleware:
    """Turns any exception into a 500, with the request's id in the log. It must be directly inside of
    ``RequestIdMiddleware``: the framework's own 500 is made further outside, has no id, and is not counted.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            await self._app(scope, receive, send)
        except (ClientDisconnect, OSError):
            raise
        except Exception:
            if scope["type"] != "http" or BEGUN_KEY in scope:
                raise
            path = scope["path"][:MAX_SHOWN_CHARACTERS]
            logger.exception("request failed: path=%r x_request_id=%s", path, scope[SCOPE_KEY])
            await error_response(InternalError())(scope, receive, send)
