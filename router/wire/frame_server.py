"""A worker's side of its connections to routers on the same host: tokens and calls that bypass Ray.

An item of a Ray stream costs sender and receiver far more CPU than writing and reading a socket does, whatever its
size, and a call over Ray takes longer than a short step. The router asks the worker for an offer by a call over Ray,
and presents the offer's key at the socket: so only callers of a worker can read from it. The socket has an abstract
name, so a killed process leaves no file behind. Abstract names exist on Linux only; elsewhere, and between hosts,
everything goes over Ray.

Protocol: the key, then numbered frames (`router/wire/frames.py`). Closing the connection ends the stream.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from router.wire.frame_connection import FrameConnection
from router.wire.frames import LINK_VERSION

logger = logging.getLogger(f"baton.{__name__}")

KEY_BYTES: Final = 16
KEY_TIMEOUT_S: Final = 10.0
"""How long an offer is valid, and how long a client that connects may take to send its key."""

LAST_FRAMES_S: Final = 2.0
"""How long a closing server waits for readers to take the last frames."""

_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 64


@dataclass(frozen=True, slots=True)
class FrameOffer:
    """An offer of one connection: the socket's abstract name, the key to present, and the protocol version."""

    name: str
    key: bytes
    version: int = LINK_VERSION


class FrameServer:
    """Serves each offered stream to the client that presents its key, and answers that client's calls."""

    def __init__(self) -> None:
        self._offers: dict[bytes, _Session] = {}
        self._listener: socket.socket | None = None
        self._name = f"baton-frames-{secrets.token_hex(16)}"
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen; does nothing if the system has no abstract sockets."""
        if sys.platform != "linux":
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.bind("\0" + self._name)
        listener.listen(_BACKLOG)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def offer(self, write: Write, answer: Answer) -> FrameOffer | None:
        """Offer a connection on which ``write`` sends and ``answer`` takes calls. It must be opened within
        ``KEY_TIMEOUT_S``. None if the server does not listen.

        The stream ends when ``write`` returns; ``write`` is cancelled when the reader leaves. Calls begin in order of
        arrival; each is answered when it is done.
        """
        if self._listener is None:
            return None
        key = secrets.token_bytes(KEY_BYTES)
        self._offers[key] = _Session(write, answer)
        asyncio.get_running_loop().call_later(KEY_TIMEOUT_S, self._offers.pop, key, None)
        return FrameOffer(self._name, key)

    async def close(self) -> None:
        """Stop listening, wait until ended streams are sent, and cut off all others. Idempotent."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        if self._serving:
            await asyncio.wait(self._serving, timeout=LAST_FRAMES_S)
        for task in tuple(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # the client has gone already
        task = asyncio.get_running_loop().create_task(self._serve(connection))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.setblocking(False)
            if not _is_same_user(connection):
                return
            try:
                session = self._offers.pop(await _read_key(connection), None)
            except (OSError, EOFError, TimeoutError):
                return  # the client has left, or had no valid key
            if session is not None:
                await session.run(FrameConnection(connection))


Write = Callable[[FrameConnection], Awaitable[None]]
Answer = Callable[[bytes], Awaitable[bytes]]


class _Session:
    """One served connection."""

    def __init__(self, write: Write, answer: Answer) -> None:
        self._write = write
        self._answer = answer
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self, connection: FrameConnection) -> None:
        """Send frames until they end or the reader leaves, and answer calls, including those that came before."""
        connection.start(partial(self._begin_answer, connection))
        sending = asyncio.ensure_future(self._send_all(connection))
        try:
            await asyncio.wait((sending, connection.ended), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            for task in self._answering:
                task.cancel()
            raise
        finally:
            connection.close()
            sending.cancel()
            (failure,) = await asyncio.gather(sending, return_exceptions=True)
            # Calls are completed though nobody reads the answers: requests that they added ended with the stream.
            await asyncio.gather(*self._answering, return_exceptions=True)
            if isinstance(failure, Exception):
                logger.warning("a stream of frames ended early: %s: %s", type(failure).__name__, failure)

    async def _send_all(self, connection: FrameConnection) -> None:
        await self._write(connection)
        if self._answering:
            await asyncio.wait(self._answering, timeout=LAST_FRAMES_S)
        await connection.drained()

    def _begin_answer(self, connection: FrameConnection, number: int, call: bytes) -> None:
        task = asyncio.create_task(self._send_answer(connection, number, call))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _send_answer(self, connection: FrameConnection, number: int, call: bytes) -> None:
        connection.send(await self._answer(call), number)


async def _read_key(connection: socket.socket) -> bytes:
    loop, key = asyncio.get_running_loop(), b""
    async with asyncio.timeout(KEY_TIMEOUT_S):
        while len(key) < KEY_BYTES:
            data = await loop.sock_recv(connection, KEY_BYTES - len(key))
            if not data:
                raise EOFError
            key += data
    return key


def _is_same_user(connection: socket.socket) -> bool:
    """True when the other end belongs to the user of this process."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.getuid())
