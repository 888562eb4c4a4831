"""A worker's side of its connections to the routers of the same host: tokens and calls without Ray on their way.

An item of a Ray stream costs sender and receiver far more CPU than writing and reading a socket does, whatever its
size, and a call over Ray takes longer than a short step. The router asks the worker for an offer, by a call over Ray,
and presents its key at the socket: whoever may call a worker may read from it, and nobody else. The socket has an
abstract name, so that no file is left behind by a process that was killed. It is Linux's; elsewhere, and between hosts,
everything goes by Ray.

On the socket: the key; then numbered frames (`router/wire/frames.py`). Closing the connection ends the stream.
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
"""How long an offer stands, and how long whoever connects may take to show its key."""

LAST_FRAMES_S: Final = 2.0
"""How long a server that closes waits for readers to take the last frames."""

_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 64


@dataclass(frozen=True, slots=True)
class FrameOffer:
    """Where one connection can be had, once: the socket's abstract name, the key to show there, and what is spoken."""

    name: str
    key: bytes
    version: int = LINK_VERSION


class FrameServer:
    """Streams that were offered go to whoever shows their key, and what it asks meanwhile is answered."""

    def __init__(self) -> None:
        self._offers: dict[bytes, _Session] = {}
        self._listener: socket.socket | None = None
        self._name = f"baton-frames-{secrets.token_hex(16)}"
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen; does nothing where the system has no such sockets."""
        if sys.platform != "linux":
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.bind("\0" + self._name)
        listener.listen(_BACKLOG)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def offer(self, write: Write, answer: Answer) -> FrameOffer | None:
        """Let somebody fetch what ``write`` sends and call ``answer``, within ``KEY_TIMEOUT_S``; None where nobody can.

        The stream ends with ``write``, which is cancelled when the reader leaves. Calls are begun in the order in which
        they came; each is answered when it is done.
        """
        if self._listener is None:
            return None
        key = secrets.token_bytes(KEY_BYTES)
        self._offers[key] = _Session(write, answer)
        asyncio.get_running_loop().call_later(KEY_TIMEOUT_S, self._offers.pop, key, None)
        return FrameOffer(self._name, key)

    async def close(self) -> None:
        """Stop listening, wait until the streams that have ended are sent, and cut off what goes on. Idempotent."""
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
            return  # whoever it was has gone
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
                return  # the reader is gone, or never was one
            if session is not None:
                await session.run(FrameConnection(connection))


Write = Callable[[FrameConnection], Awaitable[None]]
Answer = Callable[[bytes], Awaitable[bytes]]


class _Session:
    """What goes over one connection."""

    def __init__(self, write: Write, answer: Answer) -> None:
        self._write = write
        self._answer = answer
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self, connection: FrameConnection) -> None:
        """Send frames until they end, or the reader leaves; answer calls meanwhile, and those that came before."""
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
            # What was asked is done, though nobody hears of it any more: what it added has ended with the stream.
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
