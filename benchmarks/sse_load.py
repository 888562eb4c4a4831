"""A closed loop of streams over plain sockets, which is cheap enough not to limit the result on a small machine."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_MARK = b"data: "
_END = b"0\r\n\r\n"
_OK = b"HTTP/1.1 200"
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLoad:
    """``num_streams`` clients, each of which sends its next request when its last answer has ended."""

    num_streams: int
    num_requests: int
    num_tokens: int
    prompt: str = "Tell me something."

    def request(self, host: str) -> bytes:
        """The request, which is always the same."""
        body = json.dumps(
            {
                "prompt": self.prompt,
                "max_tokens": self.num_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
                "temperature": 0,
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@dataclass(slots=True, kw_only=True)
class StreamResult:
    """The results of all clients together."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_events: int = 0
    num_requests: int = 0
    ttfts_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all streams."""
        return self.num_tokens / self.seconds

    @property
    def requests_per_s(self) -> float:
        """Complete answers per second."""
        return self.num_requests / self.seconds

    @property
    def ttft_ms(self) -> float:
        """Median time to the first bytes of events."""
        return statistics.median(self.ttfts_s) * 1e3


class _Connection(asyncio.Protocol):
    """One keep-alive connection; counts the events of one answer at a time, and reads its usage."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] | None = None
        self.num_events = 0
        self.num_tokens = 0
        self.first_at = 0.0
        self._tail = b""
        self._last = b""
        self._is_begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def ask(self, request: bytes) -> asyncio.Future[None]:
        assert self.transport is not None
        self.done = asyncio.get_running_loop().create_future()
        self.num_events = 0
        self.num_tokens = 0
        self.first_at = 0.0
        self._tail = self._last = b""
        self._is_begun = False
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        if not self._is_begun:
            self._is_begun = True
            if not data.startswith(_OK):
                self._fail(f"refused: {data[:200]!r}")
                return
        seen = self._tail + data
        count = seen.count(_MARK)
        if count and not self.first_at:
            self.first_at = time.perf_counter()
        self.num_events += count
        self._tail = seen[-len(_MARK) + 1 :]
        if seen.endswith(_END):
            found = _USAGE.search(self._last + data)
            self.num_tokens = int(found.group(1)) if found else 0
        self._last = data[-1024:]
        if seen.endswith(_END) and self.done is not None and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"closed in the middle of an answer: {exc}")
        self.transport = None

    def _fail(self, reason: str) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(ConnectionError(reason))


async def run_streams(url: str, load: StreamLoad) -> StreamResult:
    """Run the load to its end; every answer must have all its tokens."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    request = load.request(f"{host}:{port}")
    result = StreamResult()
    left = iter(range(load.num_requests))

    async def client() -> None:
        connection = _Connection()
        for _ in left:
            if connection.transport is None:
                _, connection = await asyncio.get_running_loop().create_connection(_Connection, host, port)
            started = time.perf_counter()
            await connection.ask(request)
            if connection.num_tokens != load.num_tokens:
                raise RuntimeError(f"{connection.num_tokens} of {load.num_tokens} tokens")
            result.num_tokens += connection.num_tokens
            result.num_events += connection.num_events
            result.num_requests += 1
            result.ttfts_s.append(connection.first_at - started)
        if connection.transport is not None:
            connection.transport.close()

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(load.num_streams)))
    result.seconds = time.perf_counter() - started
    return result
