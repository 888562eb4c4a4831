"""HTTP over raw sockets, for what HTTP clients do not do: half-closed connections, HTTP/1.0, incomplete bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """One answer; the body without its chunks."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def raw_request(path: str, body: Mapping[str, Any], *, version: str = "1.1") -> bytes:
    """A POST."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/{version}\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def exchange(port: int, request: bytes, *, half_closes: bool = False) -> RawAnswer:
    """The answer to the only request of a connection; with ``half_closes`` the client says that no more will come."""
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            await writer.drain()
            if half_closes:
                writer.write_eof()
            return await read_answer(reader)
        finally:
            writer.close()


async def read_answer(reader: asyncio.StreamReader) -> RawAnswer:
    """The next answer of a connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = await _read_chunks(reader)
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body = await reader.read()
    return RawAnswer(int(first.split()[1]), headers, body)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while num_bytes := int(await reader.readline(), 16):
        body += await reader.readexactly(num_bytes)
        await reader.readexactly(2)
    return body
