"""HTTP connections that hold little while a request's headers come, and wait for them only so long.

uvicorn keeps whatever comes until the headers are whole, and only then anybody can look at them. So what has come of a
head is measured after each read (256 KiB at most), and nothing is done for a head that comes in one: the middleware
that sees whole requests compares those exactly (``router.api.http.guard``).
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from router.api.errors import error_response
from router.api.http.connection_room import ConnectionRoom
from router.errors import (
    HeadersTimeoutError,
    HeadersTooLargeError,
    RouterError,
    TooManyConnectionsError,
    TooManyPipelinedError,
)
from router.security import SecuritySettings
from router.settings import RouterSettings

LINE_BYTES = 64
"""What a line may have beside a header's name and value: the colon, spaces, its end."""

LINGER_S = 2.0
"""For so long what a refused client goes on sending is read and dropped: a connection that is closed with anything
unread is reset, and the client may lose the answer. A body that goes on puts the end off, by ``header_timeout_s`` at
most."""

RETRY_AFTER_S = 1.0

MAX_NUM_PIPELINED = 16
"""Requests of a connection that may wait for the answers to those before. One read holds thousands of small ones, and
each takes kilobytes while it waits."""

DEFAULTS = SecuritySettings()

_rooms: WeakKeyDictionary[ServerState, ConnectionRoom] = WeakKeyDictionary()
"""One for each server of this process; uvicorn gives its connections nothing else in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """How many connections may be open, what each may send before its request is there, and how long it may leave
    what it was sent unread.

    ``router.security`` and ``router.settings`` say what the numbers mean.
    """

    max_num_headers: int = DEFAULTS.max_num_headers
    max_header_bytes: int = DEFAULTS.max_header_bytes
    header_timeout_s: float = DEFAULTS.header_timeout_s
    max_connections: int = DEFAULTS.max_connections
    write_timeout_s: float = RouterSettings().write_timeout_s

    @classmethod
    def of(cls, settings: SecuritySettings, *, write_timeout_s: float) -> Self:
        """Those of a router's settings."""
        return cls(
            max_num_headers=settings.max_num_headers,
            max_header_bytes=settings.max_header_bytes,
            header_timeout_s=settings.header_timeout_s,
            max_connections=settings.max_connections,
            write_timeout_s=write_timeout_s,
        )

    @property
    def max_unparsed_bytes(self) -> int:
        """Bytes of an unfinished head, or of what stands around a body's chunks, at most."""
        return self.max_header_bytes + LINE_BYTES * (self.max_num_headers + 1)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. What is refused is told after the answers to what came before it."""

    limits: ClassVar[HttpLimits] = HttpLimits()

    @classmethod
    def with_limits(cls, limits: HttpLimits) -> type[Self]:
        """The same protocol with other limits."""
        return type(cls.__name__, (cls,), {"limits": limits})

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        room = _rooms.get(server_state)
        if room is None:
            room = _rooms[server_state] = ConnectionRoom(self.limits.max_connections)
        self._room = room
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: RouterError | None = None
        self._is_in_head = False
        self._has_left = False  # to another protocol, with its transport
        self._is_progress = False  # what is being parsed is more than a part of a head, or framing
        self._num_unparsed_bytes = 0
        self._lingers_until_s: float | None = None  # where the last answer went out before its request's body was in

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        _end_if_unread(transport.get_extra_info("socket"), timeout_s=self.limits.write_timeout_s)
        if self._room.admit(len(self.connections)):
            self._room.wait(self)
            self._start_timer()
        else:
            self._refuse(TooManyConnectionsError(retry_after_s=RETRY_AFTER_S))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        super().connection_lost(exc)
        self._stop_timer()
        self._room.end_waiting(self)

    def drop(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse what came, and measure what that leaves behind."""
        if self._lingers_until_s is not None:
            self._put_end_off(self._lingers_until_s)
            return
        if self._refusal is not None:
            if self._is_answering:
                self.flow.pause_reading()
            return
        self._is_progress = False
        super().data_received(data)
        if self._has_left or self._refusal is not None or self.transport.is_closing():
            return
        if not self._is_progress:
            self._num_unparsed_bytes += len(data)
        else:
            self._num_unparsed_bytes = self._held_of(data) if self._is_in_head else 0
        limits = self.limits
        if self._num_unparsed_bytes > limits.max_unparsed_bytes or (
            self._is_in_head and len(self.headers) > limits.max_num_headers
        ):
            self._refuse(
                HeadersTooLargeError(max_num_headers=limits.max_num_headers, max_header_bytes=limits.max_header_bytes)
            )
        elif self._timer is None and not self._is_answering:
            self._start_timer()

    def on_message_begin(self) -> None:
        """Begin a head, with all its room and time."""
        super().on_message_begin()
        self._is_progress = self._is_in_head = True
        self._stop_timer()

    def on_headers_complete(self) -> None:
        """Begin a request."""
        self._is_progress = True
        if self._refusal is not None:
            return
        if len(self.pipeline) >= MAX_NUM_PIPELINED:
            self._refuse(TooManyPipelinedError(max_num_pipelined=MAX_NUM_PIPELINED))
            return
        self._is_in_head = False
        self._stop_timer()
        self._room.end_waiting(self)
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope and not self.cycle.keep_alive:
            self.cycle.transport = LingeringTransport(self, self.cycle)  # type: ignore[assignment]

    def linger(self) -> None:
        """End the sending half, and close the connection once the client stops sending what nobody waits for."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._lingers_until_s = self.loop.time() + self.limits.header_timeout_s
        self._put_end_off(self._lingers_until_s)

    def _put_end_off(self, until_s: float) -> None:
        self._unset_keepalive_if_required()
        self._stop_timer()
        self._timer = self.loop.call_at(min(self.loop.time() + LINGER_S, until_s), self.transport.close)

    def on_body(self, body: bytes) -> None:
        """Take a part of a body, which others bound."""
        self._is_progress = True
        if self._refusal is None:
            super().on_body(body)

    def on_response_complete(self) -> None:
        """Wait for the next request, or tell what was refused meanwhile."""
        super().on_response_complete()
        if self._is_answering or self.transport.is_closing():
            return
        self._room.wait(self)
        if self._refusal is not None:
            self._tell(self._refusal)
        elif self._is_in_head:
            self._start_timer()

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over."""
        self._has_left = True
        super().handle_websocket_upgrade()

    @property
    def _is_answering(self) -> bool:
        """Whether the last request that came has not been answered yet, and so perhaps others before it."""
        return self.cycle is not None and not self.cycle.response_complete

    def _held_of(self, data: bytes) -> int:
        """Bytes of the head that is kept, of which the last read held the beginning: its lines, and the last one's
        part."""
        num_bytes = sum(len(name) + len(value) for name, value in self.headers)
        return num_bytes + max(len(self.url), len(data) - data.rfind(b"\n") - 1)

    def _start_timer(self) -> None:
        self._unset_keepalive_if_required()
        self._timer = self.loop.call_later(self.limits.header_timeout_s, self._be_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _be_late(self) -> None:
        """Give up a client whose request did not come. One that began with it is told."""
        self._timer = None
        if self._is_in_head:
            self._refuse(HeadersTimeoutError(timeout_s=self.limits.header_timeout_s))
        else:
            self.transport.close()

    def _refuse(self, error: RouterError) -> None:
        """Read no more requests from this connection. One whose body breaks off here ends without an answer."""
        self._refusal = error
        self._stop_timer()
        if not self._is_answering:
            self._tell(error)
        elif self.cycle.more_body:
            self.transport.close()

    def _tell(self, error: RouterError) -> None:
        """Write an error as the connection's last answer, and close it."""
        self._unset_keepalive_if_required()
        path = self.url.partition(b"?")[0].decode("latin-1") if self._is_in_head else ""
        answer = error_response(error).for_path(path)
        headers = [*self.server_state.default_headers, *answer.raw_headers, (b"connection", b"close")]
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        self.transport.write(STATUS_LINE[answer.status_code] + lines + b"\r\n" + bytes(answer.body))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)


def _end_if_unread(peer: socket.socket | None, *, timeout_s: float) -> None:
    """Have the system end a connection whose client takes nothing of what waits for it, for so long.

    Nobody else could: an answer is complete once it is written, and a connection that is to be closed is kept until
    all of it is sent.
    """
    if peer is not None and peer.family in (socket.AF_INET, socket.AF_INET6):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(int(timeout_s * 1000), 1))


class LingeringTransport:
    """The transport of a connection that ends with an answer, which may be out before the request's body is in."""

    def __init__(self, protocol: BoundedProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self._transport = protocol.transport

    def close(self) -> None:
        """Close the connection; where a body still comes, not before the client had the time to read the answer."""
        if self._cycle.more_body and not self._transport.is_closing():
            self._protocol.linger()
        else:
            self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
