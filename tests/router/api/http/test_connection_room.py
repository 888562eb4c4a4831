"""How many connections there may be: those that idle go first, those that are answered never."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest
from starlette.types import Receive, Scope, Send

from router.api.http.bounded_protocol import HttpLimits
from router.api.http.connection_room import ConnectionRoom
from tests.support.router.live_app import live_app
from tests.support.router.raw_http import TIMEOUT_S, exchange, read_answer

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass(eq=False)
class FakeConnection:
    is_open: bool = True

    def drop(self) -> None:
        self.is_open = False


class Gated:
    """An application that answers at /gated when the test lets it."""

    def __init__(self) -> None:
        self.gate, self.has_begun = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/gated":
            self.has_begun.set()
            await self.gate.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def connections(port: int, count: int) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    """So many that send nothing yet."""
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            made.append((reader, writer))
        yield made


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await reader.read() == b""
    except ConnectionError:
        return True


async def test_health_is_answered_while_idle_connections_fill_the_room(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="baton")
    async with live_app(Gated(), limits=HttpLimits(max_connections=4)) as url:
        port = int(url.rsplit(":", 1)[1])
        async with connections(port, 4) as idle:
            statuses = [(await exchange(port, HEALTH)).status for _ in range(3)]

            assert statuses == [200] * 3
            assert await is_closed(idle[0][0])
    told = [record.getMessage() for record in caplog.records if "security.max_connections" in record.getMessage()]
    assert len(told) == 1


async def test_answers_in_progress_are_not_given_up_for_new_connections() -> None:
    app = Gated()
    async with live_app(app, limits=HttpLimits(max_connections=1)) as url:
        port = int(url.rsplit(":", 1)[1])
        async with connections(port, 1) as [(reader, writer)]:
            writer.write(b"GET /gated HTTP/1.1\r\nHost: x\r\n\r\n")
            await app.has_begun.wait()
            async with connections(port, 1) as [(refused, _)]:
                answer = await read_answer(refused)
            app.gate.set()

            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert (await read_answer(reader)).status == 200


async def test_kept_connection_waits_anew_after_each_answer() -> None:
    async with live_app(Gated(), limits=HttpLimits(max_connections=2)) as url:
        port = int(url.rsplit(":", 1)[1])
        async with connections(port, 2) as [(busy, writer), (idle, _)]:
            writer.write(HEALTH)
            assert (await read_answer(busy)).status == 200
            assert (await exchange(port, HEALTH)).status == 200

            assert await is_closed(idle)
            writer.write(HEALTH)
            assert (await read_answer(busy)).status == 200


def test_no_more_are_held_than_the_process_may_open_files_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))
    room, first = ConnectionRoom(1000), FakeConnection()
    room.wait(first)

    assert room.admit(3)
    assert first.is_open
    assert room.admit(4)
    assert not first.is_open


def test_limit_is_told_again_after_a_quiet_time(caplog: pytest.LogCaptureFixture) -> None:
    room = ConnectionRoom(10)
    for num_open in (11, 11, 10, 11, 9, 11):
        room.admit(num_open)

    assert len(caplog.records) == 2
