"""HEAD and OPTIONS on every path, which probes, proxies and browsers send before, or instead of, a GET."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHOD_NOT_ALLOWED = 405

IS_HEAD = "baton_is_head"
"""Scope key that marks a HEAD request, for endpoints whose answers never end."""


class MethodsMiddleware:
    """Answers HEAD as GET without the body, and OPTIONS with the methods that a path takes.

    Unknown paths, and HEAD on a path without GET, go to the application, which refuses them; its Allow header is
    completed here. Browsers' preflight requests from allowed origins are answered before they come here.
    """

    def __init__(self, app: ASGIApp, *, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] in ("GET", "POST"):
            await self._app(scope, receive, self._with_allow(scope, send))
            return
        methods = self._methods_of(scope)
        if scope["method"] == "OPTIONS" and methods:
            await Response(status_code=204, headers={"Allow": ", ".join(methods)})(scope, receive, send)
        elif scope["method"] == "HEAD" and "GET" in methods:
            await self._app({**scope, "method": "GET", IS_HEAD: True}, receive, _without_body(send))
        else:
            await self._app(scope, receive, self._with_allow(scope, send))

    def _methods_of(self, scope: Scope) -> list[str]:
        """The methods that a path takes, sorted; none if there is no such path."""
        found: set[str] = set()
        for route in self._routes:
            match, _ = route.matches(scope)
            if match is not Match.NONE:
                found |= set(getattr(route, "methods", None) or ())
        if not found:
            return []
        return sorted(found | {"OPTIONS"} | ({"HEAD"} if "GET" in found else set()))

    def _with_allow(self, scope: Scope, send: Send) -> Send:
        async def send_complete(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == METHOD_NOT_ALLOWED:
                MutableHeaders(scope=message)["Allow"] = ", ".join(self._methods_of(scope))
            await send(message)

        return send_complete


def _without_body(send: Send) -> Send:
    async def send_headers(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_headers
