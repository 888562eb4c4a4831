"""A router's end of a connection to a worker on the same host: it reads the worker's frames, and makes calls."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Final, cast

from router.wire.frame_server import FrameOffer
from router.wire.frames import LINK_VERSION, MAX_CALL_NUMBER, STREAM, FrameParser, FrameTooLongError, framed

MAX_WAITING_BYTES: Final = 1 << 20
"""Back-pressure: beyond this backlog the router stops reading, so that the worker waits."""


class LinkBrokenError(Exception):
    """The connection ended before the call was answered: whether it was carried out is unknown."""


async def open_link(offer: FrameOffer) -> FrameLink | None:
    """Open an offered connection; None if the worker's socket cannot be reached, or has another protocol version."""
    if offer.version != LINK_VERSION:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        # Such a socket connects at once or not at all. uvloop does not support abstract names.
        connection.connect("\0" + offer.name)
    except OSError:
        connection.close()
        return None
    transport, link = await asyncio.get_running_loop().create_unix_connection(FrameLink, sock=connection)
    transport.write(offer.key)
    return link


class FrameLink(asyncio.Protocol):
    """Iterates over the worker's frames until either side ends the connection; one reader at a time."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._parser = FrameParser()
        self._taker: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._last_number = STREAM
        self._has_ended = False
        self._is_paused = False

    async def call(self, frame: bytes) -> bytes:
        """Make a call, and return the worker's answer. The call is sent once, immediately, after earlier calls.

        Raises:
            LinkBrokenError: The connection ended, so there will be no answer.
        """
        if self._has_ended or self._transport is None:
            raise LinkBrokenError("the connection to the worker has ended")
        number = self._last_number = self._last_number % MAX_CALL_NUMBER + 1
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._transport.write(framed(frame, number))
        try:
            return await answer
        finally:
            del self._answers[number]

    def __aiter__(self) -> FrameLink:
        return self

    async def __anext__(self) -> bytes:
        while not self._waiting:
            if self._has_ended:
                raise StopAsyncIteration
            self._taker = asyncio.get_running_loop().create_future()
            try:
                await self._taker
            finally:
                self._taker = None
        frame = self._waiting.popleft()
        self._num_waiting_bytes -= len(frame)
        if self._is_paused and not self._waiting and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return frame

    async def aclose(self) -> None:
        """End the connection: the worker aborts what it does for this router. Idempotent."""
        self._end()

    # ---- what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is established."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not derive from it

    def data_received(self, data: bytes) -> None:
        """Bytes arrived, in chunks that need not be whole frames."""
        try:
            frames = self._parser.feed(data)
        except FrameTooLongError:
            self._end()
            return
        for number, frame in frames:
            if number == STREAM:
                self._waiting.append(frame)
                self._num_waiting_bytes += len(frame)
            elif (answer := self._answers.get(number)) is not None and not answer.done():
                answer.set_result(frame)
        if self._waiting:
            self._wake()
        if self._num_waiting_bytes > MAX_WAITING_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def connection_lost(self, _error: Exception | None) -> None:
        """The connection ended, from either side."""
        self._end()

    def _end(self) -> None:
        self._has_ended = True
        if self._transport is not None:
            self._transport.close()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(LinkBrokenError("the connection ended before the worker answered"))
        self._wake()

    def _wake(self) -> None:
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)
