"""One client of a completions API: a keep-alive connection, and the times at which the tokens of each streamed answer
came.

Over a plain socket: a general HTTP library costs more for each event than what is measured on a small machine can bear.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

READ_BYTES = 1 << 16


class LoadError(RuntimeError):
    """A server did not answer a request as expected, so the results of the load mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Tokens that were read at once: their time, in seconds on one clock, and their number."""

    at_s: float
    num_tokens: int


@dataclass(slots=True, kw_only=True)
class Answer:
    """One answer as its client measured it."""

    sent_s: float
    arrivals: list[Arrival] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole answer."""
        return sum(arrival.num_tokens for arrival in self.arrivals)

    @property
    def ttft_s(self) -> float:
        """Seconds from the request to the first token."""
        return self.arrivals[0].at_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first read; None if all came at once."""
        num_later = self.num_tokens - self.arrivals[0].num_tokens
        return (self.arrivals[-1].at_s - self.arrivals[0].at_s) / num_later if num_later else None


class AnswerParser:
    """One HTTP answer, parsed as it arrives: counts the tokens of its events, and stores any error."""

    def __init__(self) -> None:
        self.is_complete = False
        self.stays_open = True
        self.num_tokens = 0
        self.error: str | None = None
        self._status: int | None = None
        self._length: int | None = None
        self._buffer = b""
        self._body = b""

    def feed(self, data: bytes) -> int:
        """Feed bytes; returns the number of tokens that they complete."""
        before = self.num_tokens
        self._buffer += data
        if self._status is not None or self._take_head():
            while not self.is_complete and self._take_part():
                pass
        if self.is_complete and self._status != 200:
            self.error = f"{self._status}: {self._body.decode(errors='replace')}"
        return self.num_tokens - before

    def _take_head(self) -> bool:
        head, mark, rest = self._buffer.partition(b"\r\n\r\n")
        if not mark:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip().lower() for name, _, value in (s.partition(":") for s in lines)}
        self._status = int(first.split()[1])
        if headers.get("transfer-encoding") != "chunked":
            self._length = int(headers["content-length"])
        self.stays_open = headers.get("connection") != "close"
        self._buffer = rest
        return True

    def _take_part(self) -> bool:
        if self._length is not None:
            if len(self._buffer) < self._length:
                return False
            self.is_complete = True
            self._take_body(self._buffer)
            return True
        line, mark, rest = self._buffer.partition(b"\r\n")
        if not mark or len(rest) < (size := int(line.partition(b";")[0], 16)) + 2:
            return False
        self.is_complete = size == 0
        self._take_body(rest[:size])
        self._buffer = rest[size + 2 :]
        return True

    def _take_body(self, data: bytes) -> None:
        self._body += data
        if self._status == 200:
            *lines, self._body = self._body.split(b"\n")
            for line in lines:
                self._take_line(line.strip())

    def _take_line(self, line: bytes) -> None:
        if not line.startswith(b"data: ") or line == b"data: [DONE]":
            return
        event = json.loads(line[len(b"data: ") :])
        if "error" in event:
            self.error = json.dumps(event["error"])
            return
        self.num_tokens += sum(len(choice.get("token_ids") or ()) for choice in event["choices"])


class StreamClient:
    """Sends one request at a time, and waits for the complete answer."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, prompt: list[int], num_tokens: int) -> Answer:
        """Generate a greedy answer of exactly ``num_tokens`` tokens.

        Raises:
            LoadError: The server refused, failed, closed the connection, or sent another number of tokens.
        """
        request = self._request(prompt, num_tokens)
        answer = Answer(sent_s=time.perf_counter())
        try:
            parser = await self._exchange(request, answer)
        except OSError as error:
            raise LoadError(f"{self._host}:{self._port}: {error!r}") from error
        if parser.error is not None:
            raise LoadError(parser.error)
        if parser.num_tokens != num_tokens:
            raise LoadError(f"the answer has {parser.num_tokens} of {num_tokens} tokens")
        if not parser.stays_open:
            self.close()
        return answer

    async def _exchange(self, request: bytes, answer: Answer) -> AnswerParser:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        self._writer.write(request)
        parser = AnswerParser()
        while not parser.is_complete:
            data = await self._reader.read(READ_BYTES)
            if not data:
                raise LoadError(f"the connection was closed after {parser.num_tokens} tokens")
            at_s = time.perf_counter()
            if num_tokens := parser.feed(data):
                answer.arrivals.append(Arrival(at_s=at_s, num_tokens=num_tokens))
        return parser

    def _request(self, prompt: list[int], num_tokens: int) -> bytes:
        wish = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body = json.dumps({"prompt": prompt, **wish, "return_token_ids": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
