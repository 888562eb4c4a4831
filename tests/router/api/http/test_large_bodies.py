"""Many large bodies at once, over real sockets: bounded in sum, and nobody is held up for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message

from router.api.bodies.completion_body import CompletionBody
from router.api.http.request_body import read_body
from router.body_room import BodyRoom
from router.settings import RouterSettings
from tests.support.router.live_app import live_app
from tests.support.router.router_rig import FAST, RouterRig, router_rig, until

NUM_BYTES = 150_000
ONE_AT_A_TIME = replace(FAST, max_body_bytes=200_000, max_reading_bytes=200_000)
AT_ONCE_OR_NEVER = replace(ONE_AT_A_TIME, reading_wait_s=0.0)


def large(*, begin: str = '{"truncate_prompt_tokens":8,"max_tokens":1,"prompt":"') -> bytes:
    """A body that is taken, and of which the router keeps a few tokens."""
    return f'{begin}{"a" * (NUM_BYTES - len(begin) - 2)}"}}'.encode()


class Upload:
    """A client that sends a body when it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, raw: bytes) -> None:
        self._writer.write(raw)
        await self._writer.drain()

    async def status(self) -> int:
        return int((await self._reader.readline()).split()[1])


@asynccontextmanager
async def upload(url: str, header: str = f"Content-Length: {NUM_BYTES}") -> AsyncIterator[Upload]:
    """A request of which nothing but the head was sent."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n{header}\r\n\r\n"
    writer.write(head.encode())
    yield Upload(reader, writer)
    writer.close()


@asynccontextmanager
async def served(model_dir: Path, settings: RouterSettings) -> AsyncIterator[tuple[RouterRig, str, httpx.AsyncClient]]:
    async with (
        router_rig(model_dir, settings=settings) as rig,
        live_app(rig.app) as url,
        httpx.AsyncClient(base_url=url, headers={"Content-Type": "application/json"}, timeout=60.0) as client,
    ):
        yield rig, url, client
        await until(lambda: rig.service.body_room.num_taken_bytes == 0)


async def test_large_body_beyond_the_sum_is_a_503_with_retry_after_and_small_ones_pass(model_dir: Path) -> None:
    async with served(model_dir, AT_ONCE_OR_NEVER) as (rig, url, client), upload(url) as first:
        await first.send(large()[:-1])
        await until(lambda: rig.service.body_room.num_taken_bytes == NUM_BYTES)

        refused = await client.post("/v1/completions", content=large())
        small = await client.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}')
        await first.send(b"}")

        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "bodies_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert small.status_code == 200
        assert await first.status() == 200
        assert (await client.post("/v1/completions", content=large())).status_code == 200


async def test_large_bodies_beyond_the_sum_wait_for_each_other(model_dir: Path) -> None:
    settings = replace(ONE_AT_A_TIME, reading_wait_s=60.0)
    async with served(model_dir, settings) as (rig, url, client), upload(url) as first:
        await first.send(large()[:-1])
        await until(lambda: rig.service.body_room.num_taken_bytes == NUM_BYTES)
        second = asyncio.create_task(client.post("/v1/completions", content=large()))
        await until(lambda: rig.service.body_room.num_waiting_bytes == NUM_BYTES)

        await first.send(b"}")

        assert await first.status() == 200
        assert (await second).status_code == 200


async def test_body_that_trickles_holds_others_up_no_longer_than_it_may_take(model_dir: Path) -> None:
    """The time that the second one waits for it is not counted as its own."""
    settings = replace(ONE_AT_A_TIME, reading_wait_s=60.0, read_timeout_s=2.0)
    async with served(model_dir, settings) as (rig, url, client), upload(url) as first:
        await first.send(large()[:-1])
        await until(lambda: rig.service.body_room.num_taken_bytes == NUM_BYTES)

        second = await client.post("/v1/completions", content=large())

        assert await first.status() == 408
        assert second.status_code == 200


async def test_body_of_unknown_length_takes_as_much_as_it_may_become(model_dir: Path) -> None:
    async with served(model_dir, AT_ONCE_OR_NEVER) as (rig, url, _), upload(url, "Transfer-Encoding: chunked") as first:
        chunk = large()[:100_000]
        await first.send(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
        await until(lambda: rig.service.body_room.num_taken_bytes == AT_ONCE_OR_NEVER.max_body_bytes)
        await first.send(b"1\r\n}\r\n0\r\n\r\n")

        assert await first.status() == 400


@pytest.mark.parametrize("body", [large(begin='{"no json":'), large(begin='{"unknown":"'), large() + b" " * 200_000])
async def test_body_that_is_refused_gives_its_room_back(model_dir: Path, body: bytes) -> None:
    async with served(model_dir, AT_ONCE_OR_NEVER) as (_, _url, client):
        refused = await client.post("/v1/completions", content=body)

        assert refused.status_code in (400, 413)


async def test_client_that_leaves_gives_its_room_back(model_dir: Path) -> None:
    async with served(model_dir, AT_ONCE_OR_NEVER) as (rig, url, _):
        async with upload(url) as first:
            await first.send(large()[:-1])
            await until(lambda: rig.service.body_room.num_taken_bytes == NUM_BYTES)
        await until(lambda: rig.service.body_room.num_taken_bytes == 0)


async def test_body_has_its_room_until_it_is_used() -> None:
    """Texts wait to be tokenized: what was read and parsed is still there."""
    room = BodyRoom(max_bytes=NUM_BYTES, wait_s=0.0, retry_after_s=1.0)

    async def receive() -> Message:
        return {"type": "http.request", "body": large(), "more_body": False}

    headers = [(b"content-type", b"application/json"), (b"content-length", str(NUM_BYTES).encode())]
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)
    async with read_body(request, CompletionBody, settings=RouterSettings(), room=room):
        assert room.num_taken_bytes == NUM_BYTES

    assert room.num_taken_bytes == 0
