"""What clients do with their connections: close one half of it, speak HTTP/1.0, leave in the middle of a body."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn.config
from starlette.types import Message, Receive, Scope, Send

from cluster.deploy.serve_env import serve_environment
from router.api.http.http_protocol import HttpProtocol
from tests.support.router.live_app import live_app
from tests.support.router.raw_http import TIMEOUT_S, RawAnswer, exchange, raw_request
from tests.support.router.router_rig import RouterRig, router_rig, until

TEXT = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True, "seed": 1}


@pytest.fixture
async def rig(model_dir: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(model_dir) as rig:
        yield rig


@pytest.fixture
async def port(rig: RouterRig) -> AsyncIterator[int]:
    async with live_app(rig.app) as url:
        yield int(url.rsplit(":", 1)[1])


def text_of(answer: RawAnswer) -> str:
    if answer.headers["content-type"] == "application/json":
        return str(json.loads(answer.body)["choices"][0]["text"])
    *events, done, end = answer.body.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_half_closed_client_gets_its_answer(port: int, rig: RouterRig, stream: bool, version: str) -> None:
    request = raw_request(TEXT, {**BODY, "stream": stream}, version=version)

    expected = await exchange(port, raw_request(TEXT, BODY))
    answer = await exchange(port, request, half_closes=True)

    assert answer.status == 200
    assert text_of(answer) == text_of(expected)
    assert rig.service.counters.num_cancelled == 0


async def test_half_closed_client_that_waits_gets_its_answer(port: int, rig: RouterRig) -> None:
    """The end of what the client sends arrives long before the answer begins."""
    rig.decode[0].gate.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw_request(TEXT, BODY))
    await until(lambda: bool(rig.decode[0].running))
    writer.write_eof()
    # What every answer begins with comes at once: a client that is gone would refuse it.
    assert await reader.readexactly(9) == b"HTTP/1.1 "
    rig.decode[0].gate.set()

    assert (await reader.readline()) == b"200 OK\r\n"
    assert b'"finish_reason": "length"' in await reader.read()
    writer.close()


async def test_half_closed_client_is_told_what_was_wrong(port: int) -> None:
    answer = await exchange(port, raw_request(TEXT, {**BODY, "temperature": -1}), half_closes=True)

    assert answer.status == 400
    assert json.loads(answer.body)["error"]["param"] == "temperature"


async def test_half_closed_client_may_have_asked_twice(port: int) -> None:
    twice = raw_request(TEXT, BODY) + raw_request("/tokenize", {"prompt": "hello"})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(twice)
    writer.write_eof()
    said = await reader.read()
    writer.close()

    assert said.count(b"HTTP/1.1 200 OK\r\n") == 2
    assert said.index(b'"finish_reason"') < said.index(b'"max_model_len"')


@pytest.mark.parametrize(("version", "stream"), [("1.0", False), ("1.1", False), ("1.1", True)])
async def test_client_that_closes_while_it_waits_is_noticed(
    port: int, rig: RouterRig, stream: bool, version: str
) -> None:
    """It sends the same end as a client that closes one half only."""
    rig.decode[0].gate.clear()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw_request(TEXT, {**BODY, "stream": stream}, version=version))
    await until(lambda: bool(rig.decode[0].running))
    writer.close()
    await writer.wait_closed()

    try:
        await until(lambda: rig.service.counters.num_cancelled == 1)
    finally:
        rig.decode[0].gate.set()
    await until(rig.is_at_rest)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_client_that_sends_before_it_reads_gets_its_refusal(port: int, version: str) -> None:
    """A connection that is closed with a part of the body unread is reset, and the answer on it is lost."""
    num_bytes = 9_000_000
    head = f"POST {TEXT} HTTP/{version}\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}Content-Length: {num_bytes}\r\n\r\n".encode())
        await reader.readexactly(len("HTTP/1.1 413"))  # the answer is out before the body begins
        for _ in range(9):
            writer.write(b" " * (num_bytes // 9))
            await writer.drain()
        said = await reader.read()
        writer.close()

    assert said.endswith(b'"code":"body_too_large"}}')


async def test_stream_for_http_1_0_is_not_chunked(port: int) -> None:
    chunked = await exchange(port, raw_request(TEXT, {**BODY, "stream": True}))
    plain = await exchange(port, raw_request(TEXT, {**BODY, "stream": True}, version="1.0"))

    assert chunked.headers["transfer-encoding"] == "chunked"
    assert "transfer-encoding" not in plain.headers
    assert "content-length" not in plain.headers
    assert plain.headers["connection"] == "close"
    assert text_of(plain) == text_of(chunked)


@pytest.mark.parametrize("path", [TEXT, "/tokenize", "/admin/drain", "/nothing"])
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("framing", ["Content-Length: 5000", "Transfer-Encoding: chunked"])
async def test_client_that_leaves_in_the_middle_of_its_body_is_no_error(
    port: int, rig: RouterRig, path: str, resets: bool, framing: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{framing}\r\n\r\n"
    part = b'ff\r\n{"prompt": "' if "chunked" in framing else b'{"prompt": "'
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + part)
    await writer.drain()
    if resets:
        peer: socket.socket = writer.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()

    answer = await exchange(port, raw_request(TEXT, BODY))

    assert answer.status == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    await until(rig.is_at_rest)


@pytest.mark.parametrize("path", [TEXT, "/tokenize"])
async def test_connection_that_is_lost_with_the_proxy_in_front_is_no_error(
    rig: RouterRig, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Serve does not report a client whose proxy is gone: waiting for the rest of the body raises instead."""

    async def through_proxy(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        messages: list[Message] = [{"type": "http.request", "body": b'{"prompt": "', "more_body": True}]

        async def receive_of_proxy() -> Message:
            if messages:
                return messages.pop()
            raise RuntimeError("the proxy is dead")

        await rig.app(scope, receive_of_proxy, send)

    async with live_app(through_proxy) as url:
        answer = await exchange(int(url.rsplit(":", 1)[1]), raw_request(path, BODY))

    assert answer.status == 503
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_servers_that_are_started_after_its_installation_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", uvicorn.config.HTTP_PROTOCOLS["auto"])
    module, _, name = serve_environment()["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"].partition(":")

    getattr(importlib.import_module(module), name)()
    config = uvicorn.Config("none:none", log_config=None)
    with contextlib.suppress(SystemExit):  # there is no such application
        config.load()
    assert issubclass(config.http_protocol_class, HttpProtocol)
