"""HTTP connections as uvicorn serves them, and beyond: half-closed clients, and HTTP/1.0.

uvicorn takes the end of what a client sends for its departure. But a client may close that half of its connection alone
(``nc -N``, a script that calls ``shutdown``), and wait. Both send the same; what tells them apart is that the system of
a client that is gone refuses what is sent to it. So something is sent at once that belongs to any answer: the bytes
that each begins with, or, once it has begun, a zero in front of its next chunk's length. Then the connection is looked
at until the answer is complete. Only in the middle of a stream without chunks, which HTTP/1.0 gets, the next token has
to tell.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn.config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.api.http.bounded_protocol import BoundedProtocol, HttpLimits

BEGINNING = b"HTTP/1.1 "
"""What uvicorn begins every answer with."""

LEADING_ZERO = b"0"
"""Changes no number. What is written next to a chunked answer begins with a chunk's length."""

LOOK_PERIOD_S = 0.2
_TCP_CLOSE = 7
"""The kernel's state of a connection that was reset, as the first byte of TCP_INFO."""


class HttpProtocol(BoundedProtocol):
    """One connection."""

    def on_headers_complete(self) -> None:
        """Begin a request."""
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is not None and cycle.scope is self.scope and self.scope["http_version"] == "1.0":
            cycle.send = _UnchunkedSend(cycle)  # type: ignore[method-assign]

    def eof_received(self) -> bool:  # type: ignore[override]
        """True, which keeps the connection, where a whole request waits for its answer."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete or self.scheme == "https":
            return False
        cycle.keep_alive = False
        if cycle.chunked_encoding:
            self.transport.write(LEADING_ZERO)
        elif not cycle.response_started and not self.pipeline:
            self.transport.write(BEGINNING)
            cycle.transport = _BegunTransport(self.transport)  # type: ignore[assignment]
        self._look_again(cycle)
        return True

    def _look_again(self, cycle: RequestResponseCycle) -> None:
        asyncio.get_running_loop().call_later(LOOK_PERIOD_S, self._look, cycle)

    def _look(self, cycle: RequestResponseCycle) -> None:
        """Drop the connection of a client that is gone. Nobody reads from it any more, so nobody else would tell."""
        if cycle.response_complete or self.transport.is_closing():
            return
        if _is_reset(self.transport.get_extra_info("socket")):
            self.transport.abort()
        else:
            self._look_again(cycle)


class _BegunTransport:
    """A transport that the beginning of the next write went out on before."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._is_first = True

    def write(self, data: bytes) -> None:
        """Write what is missing."""
        if self._is_first:
            self._is_first = False
            if not data.startswith(BEGINNING):
                raise RuntimeError(f"an answer begins with {data[:20]!r}, and {BEGINNING!r} was sent")
            data = data[len(BEGINNING) :]
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _UnchunkedSend:
    """Sends to a client that knows no chunks: where an answer has no length, the connection's end is its end."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._has_length = False

    async def __call__(self, message: Any) -> None:
        """Send one message."""
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._has_length:
                self._cycle.chunked_encoding = False
        elif not self._has_length:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


def _is_reset(peer: Any) -> bool:
    return bool(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE)


def install(limits: HttpLimits) -> None:
    """Make HTTP servers that uvicorn starts in this process use it. uvicorn takes a class where it has names."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = HttpProtocol.with_limits(limits)  # type: ignore[assignment]
