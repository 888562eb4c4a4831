"""Frames from a worker to a router of the same host, over a socket: a step's tokens without Ray on their way.

An item of a Ray stream costs sender and receiver far more CPU than writing and reading a socket does, whatever its
size. The router asks the worker for an offer, by a call over Ray, and presents
its key at the socket: whoever may call a worker may read from it, and nobody else. The socket has an abstract name, so
that no file is left behind by a process that was killed. It is Linux's; elsewhere, and between hosts, frames go by Ray.

On the socket: the key; then frames, each with its length before it. Closing the connection ends the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
import sys
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final, cast

logger = logging.getLogger(f"baton.{__name__}")

KEY_BYTES: Final = 16
KEY_TIMEOUT_S: Final = 10.0
"""How long an offer stands, and how long whoever connects may take to show its key."""

LAST_FRAMES_S: Final = 2.0
"""How long a server that closes waits for readers to take the last frames."""

MAX_FRAME_BYTES: Final = 1 << 30
MAX_WAITING_BYTES: Final = 1 << 20
"""A reader that is further behind lets its worker wait."""

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 64


@dataclass(frozen=True, slots=True)
class FrameOffer:
    """Where one stream of frames can be had, once: the socket's abstract name and the key to show there."""

    name: str
    key: bytes


class FrameServer:
    """A worker's side: streams that were offered go to whoever shows their key."""

    def __init__(self) -> None:
        self._offers: dict[bytes, AsyncGenerator[bytes]] = {}
        self._server: asyncio.Server | None = None
        self._name = f"baton-frames-{secrets.token_hex(16)}"
        self._sending: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen; does nothing where the system has no such sockets."""
        if sys.platform != "linux":
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + self._name)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, backlog=_BACKLOG)

    def offer(self, frames: AsyncGenerator[bytes]) -> FrameOffer | None:
        """Let somebody fetch these frames, within ``KEY_TIMEOUT_S``; None where nobody can."""
        if self._server is None:
            return None
        key = secrets.token_bytes(KEY_BYTES)
        self._offers[key] = frames
        asyncio.get_running_loop().call_later(KEY_TIMEOUT_S, self._offers.pop, key, None)
        return FrameOffer(self._name, key)

    async def close(self) -> None:
        """Stop listening, wait until the streams that have ended are sent, and cut off what goes on. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._sending:
            await asyncio.wait(self._sending, timeout=LAST_FRAMES_S)
        for task in tuple(self._sending):
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._sending.add(task)
        try:
            if _is_same_user(writer.get_extra_info("socket")):
                frames = self._offers.pop(await _read_key(reader), None)
                if frames is not None:
                    await _send(frames, reader, writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass  # the reader is gone, or never was one
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()  # what was written is with the system then, which outlives this process
            self._sending.discard(task)


async def fetch_frames(offer: FrameOffer) -> AsyncGenerator[bytes] | None:
    """The frames that were offered, until the worker ends them or itself; None where its socket is out of reach.

    Closing the generator ends them there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        # Such a socket connects at once or not at all. uvloop knows no abstract names.
        connection.connect("\0" + offer.name)
    except OSError:
        connection.close()
        return None
    transport, frames = await asyncio.get_running_loop().create_unix_connection(_Frames, sock=connection)
    transport.write(offer.key)
    return _read(transport, frames)


async def _read(transport: asyncio.BaseTransport, frames: _Frames) -> AsyncGenerator[bytes]:
    try:
        while (frame := await frames.take()) is not None:
            yield frame
    finally:
        transport.close()


class _Frames(asyncio.Protocol):
    """A router's side of a connection: bytes come in as they like, frames are taken one by one."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._rest = bytearray()
        self._taker: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._has_ended = False
        self._is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        rest = self._rest
        rest += data
        start, size = 0, _LENGTH.size
        while len(rest) - start >= size:
            (length,) = _LENGTH.unpack_from(rest, start)
            end = start + size + length
            if length > MAX_FRAME_BYTES:
                self._end()
                return
            if len(rest) < end:
                break
            self._waiting.append(bytes(memoryview(rest)[start + size : end]))
            self._num_waiting_bytes += length
            start = end
        if start:
            del rest[:start]
            self._wake()
        if self._num_waiting_bytes > MAX_WAITING_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def connection_lost(self, _error: Exception | None) -> None:
        self._end()

    async def take(self) -> bytes | None:
        """The next frame; None at the end."""
        while not self._waiting:
            if self._has_ended:
                return None
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

    def _end(self) -> None:
        self._has_ended = True
        if self._transport is not None:
            self._transport.close()
        self._wake()

    def _wake(self) -> None:
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)


async def _send(frames: AsyncGenerator[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Write frames until they end, or the reader leaves."""

    async def write_all() -> None:
        async for frame in frames:
            writer.write(_LENGTH.pack(len(frame)) + frame)
            await writer.drain()

    writing = asyncio.ensure_future(write_all())
    leaving = asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (writing, leaving):
            task.cancel()
        failure, _ = await asyncio.gather(writing, leaving, return_exceptions=True)
        await frames.aclose()
        if isinstance(failure, Exception) and not isinstance(failure, OSError):
            logger.warning("a stream of frames ended early: %s: %s", type(failure).__name__, failure)


async def _read_key(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(KEY_TIMEOUT_S):
        return await reader.readexactly(KEY_BYTES)


def _is_same_user(connection: socket.socket) -> bool:
    """True when the other end belongs to the user of this process."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.getuid())
