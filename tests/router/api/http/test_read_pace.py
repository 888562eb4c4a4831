"""Clients that read slowly: those that could go on for ever are ended, and no honest one is."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from router.api.http.bounded_protocol import HttpLimits
from router.api.http.read_pace import NUM_PERIODS, ReadPace, Sent, sent_by
from tests.support.router.live_app import live_app
from tests.support.router.raw_http import TIMEOUT_S
from tests.support.router.router_rig import until

RATE, PERIOD_S = 240.0, 60.0
ENOUGH = int(RATE * PERIOD_S)


def pace() -> ReadPace:
    return ReadPace(min_bytes_per_s=RATE, period_s=PERIOD_S)


@given(steps=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 300)), min_size=1, max_size=60))
def test_whoever_reads_a_stream_as_it_comes_is_never_too_slow(steps: list[tuple[int, int]]) -> None:
    """In each period it reads what waited, and a part of what was written since: however little that is in all."""
    client, written, read = pace(), 0, 0
    for num_new, num_ahead in steps:
        read = written + min(num_ahead, num_new)
        written += num_new
        assert not client.is_too_slow(Sent(read, written - read))


@given(reads=st.lists(st.integers(0, 3 * ENOUGH), min_size=1, max_size=60))
def test_whoever_is_behind_is_judged_by_the_last_periods_together(reads: list[int]) -> None:
    client, acked = pace(), 0
    assert not client.is_too_slow(Sent(0, 500_000))
    for number, num_read in enumerate(reads):
        acked += num_read
        last = reads[max(number + 1 - NUM_PERIODS, 0) : number + 1]
        is_slow = len(last) == NUM_PERIODS and sum(last) < NUM_PERIODS * ENOUGH
        assert client.is_too_slow(Sent(acked, 500_000)) is is_slow


def test_large_answer_has_to_be_read_within_an_hour() -> None:
    client, num_bytes = pace(), 100_000_000
    looks = [client.is_too_slow(Sent(number * ENOUGH, num_bytes)) for number in range(NUM_PERIODS + 1)]

    assert looks == [False] * NUM_PERIODS + [True]
    patient = pace()
    in_time = int(num_bytes / 3600 * PERIOD_S) + 1
    assert not any(patient.is_too_slow(Sent(number * in_time, num_bytes - number * in_time)) for number in range(50))


def test_whoever_has_read_everything_begins_anew() -> None:
    client = pace()
    for _ in range(3):
        for _ in range(NUM_PERIODS):
            assert not client.is_too_slow(Sent(0, 1000))
        client.has_read_all()


class Endless:
    """Writes an endless answer, as fast as it is taken."""

    def __init__(self) -> None:
        self.num_ended = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": bytes(1024), "more_body": True})
                await asyncio.sleep(0)

        await receive()
        writing = asyncio.create_task(write())
        while (await receive())["type"] != "http.disconnect":
            pass
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        self.num_ended += 1


@asynccontextmanager
async def slow_reader(port: int, *, num_bytes: int, pause_s: float) -> AsyncIterator[asyncio.Task[None]]:
    """A client with small buffers that asks, and then reads so much again and again; the task ends with the answer."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")

        async def read() -> None:
            try:
                while await loop.sock_recv(client, num_bytes):  # noqa: ASYNC110 (how slowly it reads)
                    await asyncio.sleep(pause_s)
            except ConnectionResetError:
                return

        reading = asyncio.create_task(read())
        try:
            yield reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


@pytest.fixture
def app() -> Endless:
    return Endless()


async def test_client_that_reads_a_few_bytes_now_and_then_loses_its_connection(app: Endless) -> None:
    """It reads something all the time, so the timeout for clients that read nothing never comes."""
    limits = HttpLimits(write_timeout_s=0.5, min_read_bytes_per_s=1e7)
    async with live_app(app, limits=limits) as url:
        port = int(url.rsplit(":", 1)[1])
        async with slow_reader(port, num_bytes=512, pause_s=0.01) as reading:
            async with asyncio.timeout(TIMEOUT_S):
                await reading
            await until(lambda: app.num_ended == 1)


async def test_client_that_reads_slowly_and_steadily_keeps_it(app: Endless) -> None:
    """It is behind for many times as long as it would take to be found too slow."""
    limits = HttpLimits(write_timeout_s=0.5, min_read_bytes_per_s=100.0)
    async with live_app(app, limits=limits) as url:
        port = int(url.rsplit(":", 1)[1])
        async with slow_reader(port, num_bytes=2048, pause_s=0.01) as reading:
            await asyncio.wait((reading,), timeout=5 * NUM_PERIODS * limits.write_timeout_s)
            assert not reading.done()
            assert app.num_ended == 0


def test_what_was_sent_is_what_has_arrived_and_what_waits() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        with client, peer:
            before = sent_by(peer, num_buffered=0)
            peer.sendall(bytes(1000))
            assert client.recv(1000, socket.MSG_WAITALL) == bytes(1000)
            after = sent_by(peer, num_buffered=7)

    assert after.end - before.end == 1007
    assert after.num_waiting >= 7
