"""The live page at / with its files, and GET /admin/events: the cluster as a stream of changes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

import router.live
from router.api.http.methods import IS_HEAD
from router.live.feed import LiveFeed
from router.service import RouterService

FOLDER = Path(router.live.__file__).parent / "static"
INDEX = "index.html"

_MEDIA_TYPES: Mapping[str, str] = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

_PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Vary": "Accept",
}

_STREAM_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"))


class PageFile(NamedTuple):
    """A file of the page."""

    content: bytes
    media_type: str


@functools.cache
def page_files() -> Mapping[str, PageFile]:
    """All files of the page by name, read once."""
    files = sorted(FOLDER.iterdir())
    return {item.name: PageFile(item.read_bytes(), _MEDIA_TYPES[item.suffix]) for item in files}


class EventStream(Response):
    """Streams a feed's events until the feed ends or the client is gone."""

    def __init__(self, feed: LiveFeed) -> None:
        super().__init__()
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one watcher."""
        await send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})
        if not scope.get(IS_HEAD, False):
            leaving = asyncio.ensure_future(_left(receive))
            try:
                async with aclosing(self._feed.watch()) as frames:
                    async for frame in frames:
                        await send({"type": "http.response.body", "body": frame, "more_body": True})
                        if leaving.done():
                            return
            finally:
                leaving.cancel()
                with suppress(asyncio.CancelledError):
                    await leaving
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def add_live(app: FastAPI, service: RouterService) -> None:
    """Add the routes. ``app.state.end_watching`` ends all streams, because they never end by themselves."""
    app.state.end_watching = service.live.close

    @app.get("/")
    async def page(request: Request) -> Response:
        """Show browsers the live page. Tell other clients that this process answers."""
        if "text/html" not in request.headers.get("accept", ""):
            return JSONResponse({"status": "ok"}, headers={"Vary": "Accept"})
        return _page_response(INDEX)

    @app.get("/live/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        """A file of the page."""
        if name not in page_files():
            raise HTTPException(404)
        return _page_response(name)

    @app.get("/admin/events")
    async def events() -> Response:
        """The cluster as server-sent events: first its state, then changes and what happens."""
        service.live.check_room()
        return EventStream(service.live)


def _page_response(name: str) -> Response:
    file = page_files()[name]
    return Response(file.content, media_type=f"{file.media_type}; charset=utf-8", headers=_PAGE_HEADERS)
