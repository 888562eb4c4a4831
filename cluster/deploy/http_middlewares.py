"""The middlewares of Serve's HTTP servers. They run in Serve's proxies, too, so this module imports little."""

from __future__ import annotations

import os
from collections.abc import Mapping

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.deploy.proxy_guard import ProxyGuard, ProxyLimits
from router.api.http import http_protocol
from router.api.http.bounded_protocol import HttpLimits
from router.api.request_id import HEADER, usable_request_id

_HEADER = HEADER.encode()


class IncomingRequestIdMiddleware:
    """Keeps at most one valid request id, so that everything behind it, including Serve's servers, can repeat it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        if scope["type"] == "http":
            given = [value for name, value in scope["headers"] if name == _HEADER]
            others = [(name, value) for name, value in scope["headers"] if name != _HEADER]
            scope = {**scope, "headers": [*others, (_HEADER, usable_request_id(given).encode())]}
        await self._app(scope, receive, send)


class DecodableHeadersMiddleware:
    """Encodes values of headers that are not UTF-8 as such. Serve's proxy decodes some of them, such as a session's id,
    and answers 500 where it cannot."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        if scope["type"] == "http" and not all(value.isascii() for _, value in scope["headers"]):
            scope = {**scope, "headers": [(name, _as_utf8(value)) for name, value in scope["headers"]]}
        await self._app(scope, receive, send)


def _as_utf8(value: bytes) -> bytes:
    try:
        value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1").encode()
    return value


def limits_of_environment(environment: Mapping[str, str]) -> HttpLimits:
    """The limits that `baton serve` set for its own Ray, or that the operator of a shared Ray set."""
    standard = HttpLimits()
    return HttpLimits(
        max_num_headers=int(environment.get("BATON_PROXY_MAX_NUM_HEADERS", standard.max_num_headers)),
        max_header_bytes=int(environment.get("BATON_PROXY_MAX_HEADER_BYTES", standard.max_header_bytes)),
        header_timeout_s=float(environment.get("BATON_PROXY_HEADER_TIMEOUT_S", standard.header_timeout_s)),
        max_connections=int(environment.get("BATON_PROXY_MAX_CONNECTIONS", standard.max_connections)),
        write_timeout_s=float(environment.get("BATON_PROXY_WRITE_TIMEOUT_S", standard.write_timeout_s)),
        min_read_bytes_per_s=float(environment.get("BATON_PROXY_MIN_READ_BYTES_PER_S", standard.min_read_bytes_per_s)),
    )


def middlewares() -> list[Middleware]:
    """The middlewares that Serve puts around each of its HTTP servers. The call also installs ``HttpProtocol`` there.

    ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`` names this function. The first middleware is the outermost.
    """
    http_protocol.install(limits_of_environment(os.environ))
    return [
        Middleware(IncomingRequestIdMiddleware),
        Middleware(DecodableHeadersMiddleware),
        Middleware(ProxyGuard, limits=ProxyLimits.of_environment(os.environ)),
    ]
