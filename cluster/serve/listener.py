"""A router's own HTTP server: clients connect directly to the router's process, without a proxy in front."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI

from router.api.http.bounded_protocol import HttpLimits
from router.api.http.http_protocol import HttpProtocol

KEEP_ALIVE_S = 90
"""How long a connection may be idle: longer than clients allow, so that the clients close it."""

START_POLL_S = 0.01

Lifespan = Callable[[Any], AbstractAsyncContextManager[Any]]


class ListenError(Exception):
    """A router cannot listen, or has stopped listening."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenSettings:
    """Where a router listens itself. ``drain_timeout_s``: how long it finishes its answers when it is stopped.

    ``limits`` bounds what each connection may send before its request is complete.
    """

    host: str
    port: int
    drain_timeout_s: float
    limits: HttpLimits = field(default_factory=HttpLimits)


class RouterListener:
    """Serves an application on a port that all routers of a host share.

    Each router has its own socket on the port (``SO_REUSEPORT``). The kernel distributes new connections among the live
    sockets, so none reaches a process that ended. Only processes of the same user can share the port.
    """

    def __init__(self, settings: ListenSettings) -> None:
        """Take the port now; ``start`` begins to listen.

        Raises:
            ListenError: The address cannot be used.
        """
        self._settings = settings
        self._end_watching: Callable[[], None] = lambda: None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._socket = _bind(settings.host, settings.port)

    @property
    def port(self) -> int:
        """The port, even if the system chose it."""
        return int(self._socket.getsockname()[1])

    def around(self, lifespan: Lifespan) -> Lifespan:
        """A lifespan that accepts connections after the given lifespan's start, and stops before its end."""

        @asynccontextmanager
        async def listening(app: FastAPI) -> AsyncIterator[None]:
            async with lifespan(app):
                await self.start(app)
                try:
                    yield
                finally:
                    await self.stop()

        return listening

    async def start(self, app: FastAPI) -> None:
        """Return when connections are accepted.

        Raises:
            ListenError: Connections cannot be accepted.
        """
        config = uvicorn.Config(
            app,
            http=HttpProtocol.with_limits(self._settings.limits),
            interface="asgi3",
            ws="none",
            proxy_headers=False,
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(int(self._settings.drain_timeout_s), 1),
        )
        self._server = _Server(config)
        self._end_watching = getattr(app.state, "end_watching", self._end_watching)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise ListenError("the HTTP server stopped while it started")
            await asyncio.sleep(START_POLL_S)  # uvicorn shows its start only by this flag

    def check(self) -> None:
        """Do nothing while connections are accepted.

        Raises:
            ListenError: They are no longer accepted, though the listener was not stopped.
        """
        if self._serving is not None and self._serving.done():
            raise ListenError(f"the HTTP server on port {self._settings.port} stopped")

    async def stop(self) -> None:
        """Accept no more connections, and return when all answers are complete or ``drain_timeout_s`` is over."""
        if self._server is None or self._serving is None:
            self._socket.close()
            return
        self._end_watching()
        self._server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await self._serving


class _Server(uvicorn.Server):
    """A server that leaves the process's signal handlers alone."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def _bind(host: str, port: int) -> socket.socket:
    """A socket on a port that other processes of this user may share.

    Raises:
        ListenError: The address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ListenError(f"a router cannot listen on {host}:{port}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ListenError(
            f"a router cannot listen on {host}:{port}: {error.strerror or error}; stop the program that uses the port, "
            "or choose "
            "another `host` or `port`"
        ) from error
    return listener
