"""What a connection may send before its request is there: so many headers, so many bytes, for so long."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from router.api.http.bounded_protocol import HttpLimits
from router.api.http.http_protocol import HttpProtocol
from tests.support.router.live_app import live_app
from tests.support.router.raw_http import TIMEOUT_S, RawAnswer, exchange, read_answer
from tests.support.router.router_rig import until

LIMITS = HttpLimits(max_num_headers=20, max_header_bytes=4096, header_timeout_s=30.0)
LINES = b"a:b\r\n" * 200_000
HELLO = b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n"


class Echo:
    """Answers with the number of bytes of the body; at /gated when the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.paths: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        num_bytes, more = 0, True
        while more:
            message = await receive()
            num_bytes, more = num_bytes + len(message.get("body", b"")), message.get("more_body", False)
        if scope["path"] == "/gated":
            await self.gate.wait()
        body = str(num_bytes).encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def app() -> Echo:
    return Echo()


@pytest.fixture
async def port(app: Echo) -> AsyncIterator[int]:
    async with live_app(app, limits=LIMITS) as url:
        yield int(url.rsplit(":", 1)[1])


def code_of(answer: RawAnswer) -> str:
    return str(json.loads(answer.body)["error"]["code"])


async def sent_in_parts(port: int, parts: list[bytes]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which each part was read before the next one came, as far as the system tells."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await writer.drain()
        for _ in range(10):
            await asyncio.sleep(0)
    return reader, writer


@pytest.mark.parametrize(
    "endless",
    [
        b"GET / HTTP/1.1\r\n" + LINES,
        b"GET /" + b"u" * 1_000_000,
        b"GET / HTTP/1.1\r\nn" + b"n" * 1_000_000,
        b"GET / HTTP/1.1\r\nname: " + b"v" * 1_000_000,
        b"\r\n" * 500_000,
    ],
    ids=["lines", "url", "name", "value", "nothing"],
)
async def test_headers_without_an_end_are_refused_while_they_come(port: int, app: Echo, endless: bytes) -> None:
    answer = await exchange(port, endless)

    assert (answer.status, code_of(answer)) == (431, "headers_too_large")
    assert answer.headers["connection"] == "close"
    assert app.paths == []


async def test_refusal_has_the_shape_of_the_paths_clients(port: int) -> None:
    answer = await exchange(port, b"POST /v1/messages?beta=true HTTP/1.1\r\n" + LINES)

    assert (answer.status, json.loads(answer.body)["type"]) == (431, "error")


async def test_headers_within_the_limits_may_come_byte_by_byte(port: int) -> None:
    head = b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20 + b"\r\n"
    reader, writer = await sent_in_parts(port, [head[at : at + 1] for at in range(len(head))])

    assert (await read_answer(reader)).status == 200
    writer.close()


async def test_every_request_of_a_connection_has_all_the_room(port: int) -> None:
    large = b"GET / HTTP/1.1\r\nHost: x\r\nlong: " + b"v" * 3000 + b"\r\n\r\n"
    parts = [part for _ in range(5) for part in (large[:1500], large[1500:])]
    reader, writer = await sent_in_parts(port, parts)

    assert [(await read_answer(reader)).status for _ in range(5)] == [200] * 5
    writer.close()


async def test_bodies_count_for_nothing(port: int) -> None:
    body = b"x" * 100_000
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    second = b"GET / HTTP/1.1\r\nlong: " + b"v" * 3000
    reader, writer = await sent_in_parts(port, [head + body[:50_000], body[50_000:] + second, b"\r\n\r\n"])

    assert [(await read_answer(reader)).body for _ in range(2)] == [b"100000", b"0"]
    writer.close()


async def test_connection_ends_where_chunks_trailers_do_not(port: int) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    said = b""
    async with asyncio.timeout(TIMEOUT_S):
        with contextlib.suppress(ConnectionError):
            reader, writer = await sent_in_parts(port, [head, LINES])
            said = await reader.read()
            writer.close()

    assert said == b""


async def test_requests_before_the_refused_one_are_answered_whole(port: int, app: Echo) -> None:
    gated = b"GET /gated HTTP/1.1\r\nHost: x\r\n\r\n"
    reader, writer = await sent_in_parts(port, [HELLO + gated, b"GET / HTTP/1.1\r\n" + LINES[:5000]])
    app.gate.set()

    answers = [await read_answer(reader) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 431]
    assert await reader.read() == b""
    assert app.paths == ["/hello", "/gated"]
    writer.close()


async def test_whoever_never_ends_its_headers_is_told_and_closed(app: Echo) -> None:
    async with live_app(app, limits=HttpLimits(header_timeout_s=1.0)) as url:
        answer = await exchange(int(url.rsplit(":", 1)[1]), b"GET / HTTP/1.1\r\nHost")

    assert (answer.status, code_of(answer)) == (408, "headers_timeout")


async def test_whoever_sends_nothing_is_closed(app: Echo) -> None:
    async with live_app(app, limits=HttpLimits(header_timeout_s=0.01)) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))

        assert await reader.read() == b""
        writer.close()


class Timers:
    """An event loop's timers, on a clock that tests move; all else is the loop that runs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.handles: list[asyncio.TimerHandle] = []
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_later(self, delay_s: float, call: Callable[..., object], *values: Any) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(self.now_s + delay_s, call, values, self._loop)
        self.handles.append(handle)
        return handle

    def advance(self, by_s: float) -> None:
        self.now_s += by_s
        due = [handle for handle in self.handles if handle.when() <= self.now_s]
        self.handles = [handle for handle in self.handles if handle not in due]
        for handle in due:
            if not handle.cancelled():
                handle._run()


class Wire(asyncio.Transport):
    """A transport that keeps what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def resume_reading(self) -> None: ...

    def pause_reading(self) -> None: ...


class Connection:
    """A connection of a server without sockets, on a clock of its own."""

    def __init__(self, app: Echo) -> None:
        self.timers, self.wire = Timers(), Wire()
        config = uvicorn.Config(app, log_config=None, timeout_keep_alive=90, ws="none")
        self.protocol = HttpProtocol.with_limits(LIMITS)(config, ServerState(), {}, self.timers)  # type: ignore[arg-type]
        self.protocol.connection_made(self.wire)

    async def say(self, data: bytes, *, answers: int = 0) -> None:
        """Send, and wait until so many answers more were written."""
        wanted = self.wire.written.count(b"HTTP/1.1 200") + answers
        self.protocol.data_received(data)
        await until(lambda: self.wire.written.count(b"HTTP/1.1 200") >= wanted)


async def test_a_byte_now_and_then_does_not_put_the_deadline_off(app: Echo) -> None:
    connection = Connection(app)
    for byte in (b"G", b"E", b"T"):
        await connection.say(byte)
        connection.timers.advance(9.0)
    assert connection.wire.written == b""

    connection.timers.advance(5.0)

    assert connection.wire.written.startswith(b"HTTP/1.1 408 ")


async def test_deadline_starts_anew_with_each_request_and_ends_with_its_headers(app: Echo) -> None:
    connection = Connection(app)
    for _ in range(3):
        connection.timers.advance(20.0)
        await connection.say(HELLO[:9])
        connection.timers.advance(20.0)
        await connection.say(HELLO[9:], answers=1)
    connection.timers.advance(60.0)
    assert not connection.wire.is_closed

    await connection.say(b"\r\n")
    connection.timers.advance(31.0)

    assert connection.wire.is_closed
    assert connection.wire.written.count(b"HTTP/1.1 ") == 3


async def test_answer_and_body_take_their_time(app: Echo) -> None:
    connection = Connection(app)
    await connection.say(b"POST /gated HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nx")
    connection.timers.advance(100.0)
    await connection.say(b"xx" + HELLO[:9])
    connection.timers.advance(100.0)
    assert connection.wire.written == b""

    app.gate.set()
    await connection.say(b"", answers=1)
    connection.timers.advance(29.0)
    assert connection.wire.written.count(b"HTTP/1.1 ") == 1
    connection.timers.advance(2.0)

    assert connection.wire.written.count(b"HTTP/1.1 408 ") == 1


async def test_a_body_without_an_end_that_nobody_waits_for_is_cut_off() -> None:
    async def refuse(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async with live_app(refuse, limits=HttpLimits(header_timeout_s=0.5)) as url, asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(b"POST / HTTP/1.1\r\nConnection: close\r\nContent-Length: 1000000000000\r\n\r\n")
        assert (await read_answer(reader)).status == 413
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b" " * 1000)
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()
