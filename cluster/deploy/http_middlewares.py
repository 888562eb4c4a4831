"""What Serve's HTTP servers do before anything else. It runs in Serve's proxies, too, and imports little."""

from __future__ import annotations

import os

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.deploy.proxy_guard import ProxyGuard, ProxyLimits
from router.api.http import http_protocol
from router.api.request_id import HEADER, usable_request_id

_HEADER = HEADER.encode()


class IncomingRequestIdMiddleware:
    """Lets at most one usable request id in: whatever comes later, Serve's own servers included, can repeat it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        if scope["type"] == "http":
            given = [value for name, value in scope["headers"] if name == _HEADER]
            others = [(name, value) for name, value in scope["headers"] if name != _HEADER]
            scope = {**scope, "headers": [*others, (_HEADER, usable_request_id(given).encode())]}
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """What Serve puts around each of its HTTP servers; they speak as ``HttpProtocol`` from now on.

    Named in ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``. The first one is the outermost.
    """
    http_protocol.install()
    return [
        Middleware(IncomingRequestIdMiddleware),
        Middleware(ProxyGuard, limits=ProxyLimits.of_environment(os.environ)),
    ]
