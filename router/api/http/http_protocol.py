"""HTTP connections of uvicorn, extended for half-closed clients and for HTTP/1.0.

When a client closes its sending half, uvicorn assumes that the client is gone. But it may have closed only that half
(``nc -N``, a script that calls ``shutdown``), and wait for the answer. Both cases look the same on the wire, except
that the system of a departed client resets the connection when something is sent to it. So bytes that belong to any
answer are sent at once: its first bytes or, once it has begun, a zero in front of its next chunk's length. Then the
connection's state is polled until the answer is complete. In the middle of an unchunked stream, which HTTP/1.0 gets,
only the next token can show it.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn.config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.api.http.bounded_protocol import BoundedProtocol, HttpLimits

BEGINNING = b"HTTP/1.1 "
"""The bytes with which uvicorn begins every answer."""

LEADING_ZERO = b"0"
"""A leading zero. The next write of a chunked answer begins with a chunk's length, which it does not change."""

LOOK_PERIOD_S = 0.2
_TCP_CLOSE = 7
"""The first byte of TCP_INFO for a connection that was reset."""


class HttpProtocol(BoundedProtocol):
    """One connection."""

    def on_headers_complete(self) -> None:
        """Begin a request."""
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is not None and cycle.scope is self.scope and self.scope["http_version"] == "1.0":
            cycle.send = _UnchunkedSend(cycle)  # type: ignore[method-assign]

    def eof_received(self) -> bool:  # type: ignore[override]
        """True, which keeps the connection open, if a complete request waits for its answer."""
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
        """Drop the connection if the client is gone. Nothing reads from it any more, so nothing else would notice."""
        if cycle.response_complete or self.transport.is_closing():
            return
        if _is_reset(self.transport.get_extra_info("socket")):
            self.transport.abort()
        else:
            self._look_again(cycle)


class _BegunTransport:
    """A transport on which the first bytes of the next write were already sent."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._is_first = True

    def write(self, data: bytes) -> None:
        """Write the remaining bytes."""
        if self._is_first:
            self._is_first = False
            if not data.startswith(BEGINNING):
                raise RuntimeError(f"an answer begins with {data[:20]!r}, but {BEGINNING!r} was sent already")
            data = data[len(BEGINNING) :]
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _UnchunkedSend:
    """Sends to a client without chunked encoding: an answer without a length ends with the connection."""

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
    """Make uvicorn's HTTP servers in this process use this protocol. uvicorn accepts a class in place of a name."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = HttpProtocol.with_limits(limits)  # type: ignore[assignment]
