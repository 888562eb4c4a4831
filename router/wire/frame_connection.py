"""A worker's end of a connection to a router: any thread can send frames, and sending never blocks on the reader."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable

from router.wire.frames import STREAM, FrameParser, FrameTooLongError, framed

_READ_BYTES = 1 << 18


class FrameConnection:
    """Everything but :meth:`send` and :attr:`is_behind` belongs to the event loop that made it.

    Bytes that the socket does not take at once are buffered here, and the loop sends them once the reader has read. For
    back-pressure, senders of much data check :attr:`is_behind` first, or await :meth:`drained`.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._backlog = bytearray()
        self._is_open = True
        self._is_writing = False
        self._parser = FrameParser()
        self._on_call: Callable[[int, bytes], None] | None = None
        self._caught_up: list[asyncio.Future[None]] = []
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the reader has left, or the connection broke."""

    @property
    def is_behind(self) -> bool:
        """True while bytes are still buffered."""
        return bool(self._backlog)

    def send(self, frame: bytes, number: int = STREAM) -> None:
        """Send a frame, after all others; does nothing once the connection has ended. From any thread."""
        data = framed(frame, number)
        with self._lock:
            if not self._is_open:
                return
            if not self._backlog:
                num_sent = self._send_some(data)
                if num_sent == len(data):
                    return
                data = data[num_sent:]
                self._tell_loop(self._write_on)
            self._backlog += data

    def start(self, on_call: Callable[[int, bytes], None]) -> None:
        """Begin to read: pass the router's calls, by number, to ``on_call``, and notice when the router leaves."""
        self._on_call = on_call
        self._loop.add_reader(self._socket, self._read_some)

    async def drained(self) -> None:
        """Wait until nothing is buffered, or the connection has ended."""
        while self._backlog:
            waiter = self._loop.create_future()
            self._caught_up.append(waiter)
            await waiter

    def close(self) -> None:
        """Close the connection at once; bytes that the socket has taken still arrive. Idempotent."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            self._backlog.clear()
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
        self._wake()
        self._end()

    def _send_some(self, data: bytes | bytearray) -> int:
        """Return how many bytes the socket took: none if the connection broke, which the read side notices."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self._tell_loop(self._end)
            return 0

    def _tell_loop(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed, and the process is about to end
            self._loop.call_soon_threadsafe(function)

    def _write_on(self) -> None:
        if self._is_open and not self._is_writing:
            self._is_writing = True
            self._loop.add_writer(self._socket, self._write_some)

    def _write_some(self) -> None:
        with self._lock:
            del self._backlog[: self._send_some(self._backlog)]
            if self._backlog:
                return
            self._loop.remove_writer(self._socket)
            self._is_writing = False
        self._wake()

    def _read_some(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            frames = self._parser.feed(data)
        except FrameTooLongError:
            data, frames = b"", []
        if not data:
            self._loop.remove_reader(self._socket)
            self._end()
        assert self._on_call is not None
        for number, frame in frames:
            self._on_call(number, frame)

    def _wake(self) -> None:
        waiters, self._caught_up = self._caught_up, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
