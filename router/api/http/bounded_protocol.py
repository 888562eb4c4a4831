"""HTTP connections that bound the memory and the time of a request's headers.

uvicorn buffers headers until they are complete, and only then can other code see them. So an incomplete head is
measured after each read (256 KiB at most). A head that arrives in one read is not measured here, because the middleware
for whole requests checks it exactly (``router.api.http.guard``).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from router.api.errors import error_response
from router.api.http.connection_room import ConnectionRoom
from router.api.http.read_pace import ReadPace, let_kernel_ask_early, sent_by
from router.api.http.sparse_log import SparseLog
from router.errors import (
    HeadersTimeoutError,
    HeadersTooLargeError,
    RouterError,
    TooManyConnectionsError,
    TooManyPipelinedError,
)
from router.security import SecuritySettings
from router.settings import RouterSettings

logger = logging.getLogger(f"baton.{__name__}")

LINE_BYTES = 64
"""Bytes of a line besides a header's name and value: the colon, spaces, the line end."""

LINGER_S = 2.0
"""How long data that a refused client keeps sending is read and dropped. Closing a connection with unread data resets
it, and the client may lose the answer. A body that continues extends this time, to ``header_timeout_s`` at most."""

RETRY_AFTER_S = 1.0

MAX_UNREAD_BYTES = 64 * 1024
RESUMING_BYTES = 50_000
"""An answer is written on until so many bytes are unread, and goes on once so few are. The difference is what a client
reads at the least pace within the default ``write_timeout_s``: so that no write waits longer for a slow one."""

MAX_NUM_PIPELINED = 16
"""Requests of a connection that may wait for the answers to those before. One read holds thousands of small ones, and
each takes kilobytes while it waits."""

DEFAULTS, READING = SecuritySettings(), RouterSettings()

_rooms: WeakKeyDictionary[ServerState, ConnectionRoom] = WeakKeyDictionary()
"""The room of each server in this process, found by the only object that uvicorn's connections share."""

_clients_log = SparseLog(logging.getLogger("uvicorn.error"))
"""Where uvicorn's connections write: a line for each request that is no HTTP would be a cheap way to fill a disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """How many connections may be open, what each may send before its request is complete, and how long it may leave
    answers unread, or how slowly read them.

    ``router.security`` and ``router.settings`` define the numbers.
    """

    max_num_headers: int = DEFAULTS.max_num_headers
    max_header_bytes: int = DEFAULTS.max_header_bytes
    header_timeout_s: float = DEFAULTS.header_timeout_s
    max_connections: int = DEFAULTS.max_connections
    write_timeout_s: float = READING.write_timeout_s
    min_read_bytes_per_s: float = READING.min_read_bytes_per_s

    @classmethod
    def of(cls, settings: SecuritySettings, reading: RouterSettings) -> Self:
        """The limits from a router's settings."""
        return cls(
            max_num_headers=settings.max_num_headers,
            max_header_bytes=settings.max_header_bytes,
            header_timeout_s=settings.header_timeout_s,
            max_connections=settings.max_connections,
            write_timeout_s=reading.write_timeout_s,
            min_read_bytes_per_s=reading.min_read_bytes_per_s,
        )

    @property
    def max_unparsed_bytes(self) -> int:
        """Maximum bytes of an incomplete head, or of the framing around a body's chunks."""
        return self.max_header_bytes + LINE_BYTES * (self.max_num_headers + 1)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A refusal is sent after the answers to earlier requests."""

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
        self.logger = _clients_log  # type: ignore[assignment]
        room = _rooms.get(server_state)
        if room is None:
            room = _rooms[server_state] = ConnectionRoom(self.limits.max_connections)
        self._room = room
        self._timer: asyncio.TimerHandle | None = None
        self._next_look: asyncio.TimerHandle | None = None
        self._refusal: RouterError | None = None
        self._is_in_head = False
        self._has_left = False  # upgraded: another protocol has taken the transport
        self._is_progress = False  # the data being parsed is more than part of a head, or framing
        self._num_unparsed_bytes = 0
        self._lingers_until_s: float | None = None  # set if the last answer came before its request's body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._watch_reading(transport)
        if self._room.admit(len(self.connections)):
            self._room.wait(self)
            self._start_timer()
        else:
            self._refuse(TooManyConnectionsError(retry_after_s=RETRY_AFTER_S))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers and waits."""
        super().connection_lost(exc)
        self._stop_timer()
        self._room.end_waiting(self)
        if self._next_look is not None:
            self._next_look.cancel()

    def _watch_reading(self, transport: asyncio.Transport) -> None:
        """Have the connection end if its client reads nothing for long, or hardly anything for longer."""
        peer, limits = transport.get_extra_info("socket"), self.limits
        if peer is None or peer.family not in (socket.AF_INET, socket.AF_INET6):
            return
        _end_if_unread(peer, timeout_s=limits.write_timeout_s)
        if limits.min_read_bytes_per_s:
            let_kernel_ask_early(peer)
            transport.set_write_buffer_limits(high=MAX_UNREAD_BYTES, low=RESUMING_BYTES)
            pace = ReadPace(min_bytes_per_s=limits.min_read_bytes_per_s, period_s=limits.write_timeout_s)
            self._next_look = self.loop.call_later(limits.write_timeout_s, self._look_at_reading, peer, pace)

    def _look_at_reading(self, peer: socket.socket, pace: ReadPace) -> None:
        num_buffered = self.transport.get_write_buffer_size()
        try:
            sent = sent_by(peer, num_buffered=num_buffered) if num_buffered else None
        except OSError:
            return  # it is closed
        if sent is None:
            pace.has_read_all()
        elif pace.is_too_slow(sent):
            logger.info("client reads too slowly: num_waiting_bytes=%d", num_buffered)
            self.drop()
            return
        self._next_look = self.loop.call_later(self.limits.write_timeout_s, self._look_at_reading, peer, pace)

    def drop(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse the data, and measure what remains unparsed."""
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
        """Begin a head, with its full limits of size and time."""
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
        """Close the sending half, and the whole connection once the client stops sending data that nobody reads."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._lingers_until_s = self.loop.time() + self.limits.header_timeout_s
        self._put_end_off(self._lingers_until_s)

    def _put_end_off(self, until_s: float) -> None:
        self._unset_keepalive_if_required()
        self._stop_timer()
        self._timer = self.loop.call_at(min(self.loop.time() + LINGER_S, until_s), self.transport.close)

    def on_body(self, body: bytes) -> None:
        """Take a part of a body; bodies are bounded elsewhere."""
        self._is_progress = True
        if self._refusal is None:
            super().on_body(body)

    def on_response_complete(self) -> None:
        """Wait for the next request, or send a refusal that came up meanwhile."""
        super().on_response_complete()
        if self._is_answering or self.transport.is_closing():
            return
        self._room.wait(self)
        if self._refusal is not None:
            self._tell(self._refusal)
        elif self._is_in_head:
            self._start_timer()

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over to the websocket protocol."""
        self._has_left = True
        super().handle_websocket_upgrade()

    @property
    def _is_answering(self) -> bool:
        """True if the last request, and perhaps earlier ones, has not been answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _held_of(self, data: bytes) -> int:
        """Buffered bytes of the head that began in the last read: its complete lines, and the incomplete last line."""
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
        """Give up a client whose request did not come in time. A client that had begun it gets an error."""
        self._timer = None
        if self._is_in_head:
            self._refuse(HeadersTimeoutError(timeout_s=self.limits.header_timeout_s))
        else:
            self.transport.close()

    def _refuse(self, error: RouterError) -> None:
        """Read no more requests from this connection. A request whose body is cut off here gets no answer."""
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


def _end_if_unread(peer: socket.socket, *, timeout_s: float) -> None:
    """Let the kernel end a connection whose client reads nothing of the data that waits for it for ``timeout_s``.

    The server itself could not: it counts an answer as complete once it is written, and a closing connection stays open
    until all data is sent.
    """
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(int(timeout_s * 1000), 1))


class LingeringTransport:
    """The transport of a connection that closes after an answer, perhaps before the request's body has arrived."""

    def __init__(self, protocol: BoundedProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self._transport = protocol.transport

    def close(self) -> None:
        """Close the connection; if a body is still arriving, first give the client time to read the answer."""
        if self._cycle.more_body and not self._transport.is_closing():
            self._protocol.linger()
        else:
            self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
