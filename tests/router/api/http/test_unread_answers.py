"""Clients that send and do not read: they keep no connection for good, and little memory for requests that wait."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
from starlette.types import Receive, Scope, Send

from router.api.http.bounded_protocol import MAX_NUM_PIPELINED, HttpLimits
from tests.support.router.live_app import live_app
from tests.support.router.raw_http import TIMEOUT_S, exchange, read_answer

NUM_BYTES = 64 << 20
"""More than the system holds for a client that does not read."""

LIMITS = HttpLimits(max_connections=1, write_timeout_s=0.3)


def request(path: str, *, headers: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode()


class Large:
    """Answers /large with many bytes, and everything else with none; /gated when the gate is open."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.gate, self.has_begun = asyncio.Event(), asyncio.Event()
        self.has_answered = asyncio.Event()
        self.has_next = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_large = scope["path"] == "/large"
        if scope["path"] == "/gated":
            self.has_begun.set()
            await self.gate.wait()
        self.bodies.append((await receive())["body"])
        if scope["path"] == "/next":
            self.has_next.set()
        body = bytes(NUM_BYTES if is_large else 0)
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        if is_large:
            self.has_answered.set()


@pytest.fixture
async def app() -> Large:
    return Large()


@pytest.fixture
async def port(app: Large) -> AsyncIterator[int]:
    async with live_app(app, limits=LIMITS) as url:
        yield int(url.rsplit(":", 1)[1])


@contextmanager
def deaf_client(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port)) as client:
        yield client


async def until_there_is_room(port: int) -> None:
    """No other connection is accepted as long as the only one is being answered, or is about to be closed."""
    async with asyncio.timeout(TIMEOUT_S):
        while (await exchange(port, request("/health"))).status != 200:
            pass


async def test_client_that_leaves_an_answer_unread_makes_room_for_others(app: Large, port: int) -> None:
    with deaf_client(port) as client:
        client.sendall(request("/large") + request("/next"))
        await app.has_next.wait()
        await until_there_is_room(port)


async def test_so_does_one_whose_connection_ends_with_that_answer(app: Large, port: int) -> None:
    with deaf_client(port) as client:
        client.sendall(request("/large", headers="Connection: close\r\n"))
        await app.has_answered.wait()
        await until_there_is_room(port)


async def test_requests_that_are_sent_ahead_wait_in_small_numbers(app: Large, port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request("/gated") + request("/next") * 1000)
    await app.has_begun.wait()
    app.gate.set()
    answers = [await read_answer(reader) for _ in range(MAX_NUM_PIPELINED + 2)]

    assert [answer.status for answer in answers] == [200] * (MAX_NUM_PIPELINED + 1) + [400]
    assert json.loads(answers[-1].body)["error"]["code"] == "too_many_pipelined"
    assert await reader.read() == b""
    writer.close()


async def test_body_of_a_request_too_many_is_none_of_the_one_before(app: Large, port: int) -> None:
    body = b"POST /next HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request("/gated") + body * (MAX_NUM_PIPELINED + 5))
    await app.has_begun.wait()
    app.gate.set()
    answers = [await read_answer(reader) for _ in range(MAX_NUM_PIPELINED + 2)]

    assert [answer.status for answer in answers] == [200] * (MAX_NUM_PIPELINED + 1) + [400]
    assert app.bodies == [b""] + [b"abc"] * MAX_NUM_PIPELINED
    writer.close()
