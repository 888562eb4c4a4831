"""What clients do with their connections, through Serve's proxy: close one half, speak HTTP/1.0, leave too early."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import struct
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.deploy.serve_env import RAY_FOLDER
from tests.support.cluster.cluster import ClusterProcess
from tests.support.cluster.http_completions import assert_at_rest, wait_for_rest
from tests.support.cluster.standing_still import standing_still
from tests.support.router.raw_http import RawAnswer, exchange, raw_request

TEXT = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "once upon a time", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
NUM_CHOICES = 8
LONG: dict[str, Any] = {**BODY, "max_tokens": 900, "n": NUM_CHOICES}
PATHS = (TEXT, "/v1/chat/completions", "/tokenize", "/detokenize", "/admin/drain", "/nothing")
NUM_CLIENTS = 60
MAX_TRIES = 5
CANCEL_TIMEOUT_S = 120.0


def text_of(answer: RawAnswer) -> str:
    if answer.headers["content-type"] == "application/json":
        return str(json.loads(answer.body)["choices"][0]["text"])
    events = answer.body.decode().removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    return "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_half_closed_client_gets_its_answer(cluster: ClusterProcess, stream: bool, version: str) -> None:
    expected = await exchange(cluster.port, raw_request(TEXT, BODY))
    request = raw_request(TEXT, {**BODY, "stream": stream}, version=version)
    answer = await exchange(cluster.port, request, half_closes=True)

    assert (answer.status, text_of(answer)) == (200, text_of(expected))


async def test_stream_for_http_1_0_is_not_chunked(cluster: ClusterProcess) -> None:
    answer = await exchange(cluster.port, raw_request(TEXT, {**BODY, "stream": True}, version="1.0"))

    assert "transfer-encoding" not in answer.headers
    assert answer.headers["connection"] == "close"
    assert answer.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_closes_is_still_noticed(cluster: ClusterProcess, stream: bool) -> None:
    """While the workers stand still, because they are fast, and a complete answer cannot be cancelled."""
    for _ in range(MAX_TRIES):
        before = await asyncio.to_thread(wait_for_rest, cluster.url)
        await close_amid(cluster, before, stream=stream)
        after = await asyncio.to_thread(wait_for_rest, cluster.url)
        assert_at_rest(after)
        if after["totals"]["finished"] == before["totals"]["finished"]:
            break  # otherwise the answer was complete before the workers stood still: nobody could cancel it

    assert after["totals"]["finished"] == before["totals"]["finished"]
    assert after["totals"]["cancelled"] == before["totals"]["cancelled"] + NUM_CHOICES


async def close_amid(cluster: ClusterProcess, status: dict[str, Any], *, stream: bool) -> None:
    """Send a request and close its connection while the workers stand still; return when the router has noticed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
    async with AsyncExitStack() as stopped:
        if stream:
            writer.write(raw_request(TEXT, {**LONG, "stream": True}))
            await reader.readuntil(b"data: ")
        for pid in (row["pid"] for pool in status["pools"].values() for row in pool):
            await stopped.enter_async_context(standing_still(pid))
        if not stream:
            writer.write(raw_request(TEXT, LONG))
            await load_is(cluster, NUM_CHOICES)
        writer.close()
        await load_is(cluster, 0)


async def load_is(cluster: ClusterProcess, number: int) -> None:
    """Return when the router has so many sequences in progress. It asks no worker for this."""
    async with asyncio.timeout(CANCEL_TIMEOUT_S), httpx.AsyncClient(base_url=cluster.url, trust_env=False) as client:
        while (await client.get("/load")).json()["server_load"] != number:  # noqa: ASYNC110 (the router tells nobody)
            await asyncio.sleep(0.02)


async def leave(cluster: ClusterProcess, source: random.Random) -> None:
    """Send a part of a body, and go; every other client by a reset."""
    size = source.choice([200, 5_000, 70_000, 1_000_000])
    head = f"POST {source.choice(PATHS)} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    part = b'{"prompt": "' + b"x" * source.randrange(size - 20)
    if source.random() < 0.5:
        whole = f"{head}Content-Length: {size}\r\n\r\n".encode() + part
    else:
        whole = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + b"%x\r\n%s\r\nff\r\nx" % (len(part), part)
    _, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
    try:
        writer.write(whole)
        await writer.drain()
    except ConnectionError:  # refused before all of it was read
        return
    finally:
        peer: socket.socket | None = writer.get_extra_info("socket")
        if peer is not None and source.random() < 0.5:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()


async def test_clients_that_leave_in_the_middle_of_their_bodies_leave_no_error_in_the_logs(
    cluster: ClusterProcess,
) -> None:
    source = random.Random(7)
    before = errors_in(cluster.session_folder)

    await asyncio.gather(*(leave(cluster, source) for _ in range(NUM_CLIENTS)))
    answer = await exchange(cluster.port, raw_request(TEXT, BODY))

    assert answer.status == 200
    await load_is(cluster, 0)
    assert errors_in(cluster.session_folder) == before


def errors_in(folder: Path) -> list[str]:
    """The lines of errors in the logs of the proxy, the router and the workers. Serve writes errors out at once."""
    files = [
        file
        for name in ("serve/*.log", "worker-*.err", "worker-*.out")
        for file in folder.glob(f"*/{RAY_FOLDER}/*/logs/{name}")
    ]
    assert files
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines()]
    return [line for line in lines if re.search(r"\bERROR\b|Traceback", line)]
