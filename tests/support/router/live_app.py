"""An ASGI application behind a real socket, in the test's own event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from router.api.http.bounded_protocol import HttpLimits
from router.api.http.http_protocol import HttpProtocol


@asynccontextmanager
async def live_app(app: ASGIApp, *, limits: HttpLimits | None = None) -> AsyncIterator[str]:
    """Serve on a free port of the loopback interface, as Serve's servers do for us; yields the base URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        protocol = HttpProtocol if limits is None else HttpProtocol.with_limits(limits)
        config = uvicorn.Config(app, http=protocol, lifespan="off", log_level="warning", access_log=False)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server._serve([listener]))
        try:
            while not server.started:  # noqa: ASYNC110 (uvicorn offers no event)
                await asyncio.sleep(0.001)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving
