"""Clients that ask for something long over a raw socket, and disconnect at different moments without saying so."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Moment: TypeAlias = Literal["before the body", "after the body", "while waiting", "with the first token", "mid-stream"]
MOMENTS: tuple[Moment, ...] = (
    "before the body",
    "after the body",
    "while waiting",
    "with the first token",
    "mid-stream",
)

MAX_WAIT_S = 1.5
CLIENT_TIMEOUT_S = 240.0
EVENT = b"data: "


@dataclass(slots=True)
class Crowd:
    """The outcomes of the clients: how many left at each moment, and how many got something that they did not ask
    for."""

    left: Counter[Moment] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


async def visit(host: str, port: int, *, prompts: Sequence[Sequence[int]], max_tokens: int, seed: int) -> Crowd:
    """One client for each prompt, all at once; each leaves at its own moment."""
    source = random.Random(seed)
    crowd = Crowd()
    clients = [
        _Client(prompt, MOMENTS[number % len(MOMENTS)], random.Random(source.random()), max_tokens=max_tokens)
        for number, prompt in enumerate(prompts)
    ]
    await asyncio.gather(*(client.live(host, port, crowd) for client in clients))
    return crowd


class _Client:
    def __init__(self, prompt: Sequence[int], moment: Moment, source: random.Random, *, max_tokens: int) -> None:
        body: dict[str, Any] = {"prompt": list(prompt), "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        body["return_token_ids"] = True  # then every token is an event, whatever its text
        if moment == "while waiting":
            body["stream"] = source.random() < 0.5
        self._body = json.dumps(body).encode()
        self._moment: Moment = moment
        self._source = source

    async def live(self, host: str, port: int, crowd: Crowd) -> None:
        """Send a request, wait for the moment, and leave."""
        try:
            async with asyncio.timeout(CLIENT_TIMEOUT_S):
                await asyncio.sleep(self._source.random())
                reader, writer = await asyncio.open_connection(host, port)
                try:
                    await self._ask(writer)
                    await self._wait(reader)
                    crowd.left[self._moment] += 1
                finally:
                    self._leave(writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            crowd.problems.append(f"{self._moment}: {error!r}")

    async def _ask(self, writer: asyncio.StreamWriter) -> None:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(self._body)}\r\n\r\n"
        )
        whole = head.encode() + self._body
        if self._moment == "before the body":
            whole = whole[: self._source.randrange(1, len(whole))]
        writer.write(whole)
        await writer.drain()

    async def _wait(self, reader: asyncio.StreamReader) -> None:
        if self._moment == "while waiting":
            await asyncio.sleep(self._source.random() * MAX_WAIT_S)
        elif self._moment == "with the first token":
            await reader.readuntil(EVENT)
        elif self._moment == "mid-stream":
            for _ in range(self._source.randrange(2, 16)):
                await reader.readuntil(EVENT)

    def _leave(self, writer: asyncio.StreamWriter) -> None:
        """Half of the clients close the connection, half reset it, as when a process dies."""
        if self._source.random() < 0.5:
            peer: socket.socket | None = writer.get_extra_info("socket")
            if peer is not None:
                with contextlib.suppress(OSError):
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
