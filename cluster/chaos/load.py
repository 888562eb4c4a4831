"""The load of a scenario: streams of requests that go on until its end, and the answer to each request."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import httpx

from cluster.chaos.scenario import LoadSection

REQUEST_TIMEOUT_S = 300.0
RETRY_PAUSE_S = 0.2
TOKEN_IDS = 250
"""Ids below this exist in every vocabulary that has all bytes."""

RETRIED = (429, 503)
"""Status codes that ask the client to retry; the request was not accepted."""


WORDS_OF_PROXIES = "Internal Server Error"
"""The answer of Serve's proxy and HAProxy when the router that they chose is gone. Baton's own errors are JSON."""

Breaker: TypeAlias = Literal["connection", "proxy"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosRequest:
    """One request, which is sent unchanged again and again."""

    prompt: tuple[int, ...]
    num_tokens: int


@dataclass(slots=True, kw_only=True)
class Answer:
    """The answer to one request. Times are on the monotonic clock; ``error`` is empty when it ended well.

    ``broken_by`` says what ended the answer without an error from Baton: the connection, or a proxy's error.
    """

    ask: ChaosRequest
    started_s: float
    ended_s: float = float("inf")
    tokens: list[int] = field(default_factory=list)
    event_times_s: list[float] = field(default_factory=list)
    error: str = ""
    broken_by: Breaker = None
    num_refusals: int = 0

    def longest_pause_s(self, since_s: float, until_s: float) -> float:
        """The longest pause between events that overlaps a span of time; the wait for the first token counts, too."""
        moments = [self.started_s, *self.event_times_s]
        gaps = [
            later - earlier for earlier, later in itertools.pairwise(moments) if later >= since_s and earlier <= until_s
        ]
        return max(gaps, default=0.0)


def make_asks(load: LoadSection) -> list[ChaosRequest]:
    """The requests of a load."""
    draw = random.Random(load.seed)
    return [
        ChaosRequest(
            prompt=tuple(draw.randrange(3, TOKEN_IDS) for _ in range(draw.randint(*load.prompt_tokens))),
            num_tokens=draw.randint(*load.output_tokens),
        )
        for _ in range(load.distinct)
    ]


class LoadRun:
    """Streams of requests to one cluster. Each stream pauses for ``pause_s`` between two requests."""

    def __init__(
        self, client: httpx.AsyncClient, asks: list[ChaosRequest], *, num_streams: int, pause_s: float = 0.0
    ) -> None:
        self._client = client
        self._asks = asks
        self._num_streams = num_streams
        self._pause_s = pause_s
        self._next = 0
        self._is_ending = False
        self._tasks: list[asyncio.Task[None]] = []
        self.answers: list[Answer] = []
        self.num_tokens = 0
        self.newest_begun_s = -math.inf
        """When the newest request that has its first token was sent."""
        self.is_proxy_away = False
        """True while connections may be refused: then the request was not accepted, and the client retries."""

    async def once(self) -> dict[ChaosRequest, list[int]]:
        """Send every request once, without any faults, and return the tokens of each.

        Raises:
            httpx.HTTPError: A request failed.
        """
        gate = asyncio.Semaphore(self._num_streams)

        async def one(ask: ChaosRequest) -> Answer:
            async with gate:
                return await self._request(ask)

        answers = await asyncio.gather(*(one(ask) for ask in self._asks))
        for answer in answers:
            if answer.error:
                raise httpx.HTTPError(f"the run without faults failed: {answer.error}")
        return {answer.ask: answer.tokens for answer in answers}

    def start(self) -> None:
        """Begin."""
        self._tasks = [asyncio.create_task(self._stream()) for _ in range(self._num_streams)]

    async def finish(self) -> None:
        """Begin no more requests, and wait for the running ones."""
        self._is_ending = True
        await asyncio.gather(*self._tasks)

    async def cancel(self) -> None:
        """Cancel all streams at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _stream(self) -> None:
        while not self._is_ending:
            ask = self._asks[self._next % len(self._asks)]
            self._next += 1
            self.answers.append(await self._request(ask))
            if self._pause_s:
                await asyncio.sleep(self._pause_s)

    async def _request(self, ask: ChaosRequest) -> Answer:
        answer = Answer(ask=ask, started_s=time.monotonic())
        deadline_s = answer.started_s + REQUEST_TIMEOUT_S
        try:
            while not await self._try(answer):
                answer.num_refusals += 1
                if time.monotonic() > deadline_s:
                    answer.error = f"refused {answer.num_refusals} times"
                    break
                await asyncio.sleep(RETRY_PAUSE_S)
        except httpx.HTTPError as error:
            if not answer.error:
                answer.error, answer.broken_by = f"{type(error).__name__}: {error}", "connection"
        finally:
            answer.ended_s = time.monotonic()
        if not answer.error and len(answer.tokens) != ask.num_tokens:
            answer.error = f"ended after {len(answer.tokens)} of {ask.num_tokens} tokens without saying why"
            answer.broken_by = "connection"
        return answer

    async def _try(self, answer: Answer) -> bool:
        """Send the request once. False when the cluster asked to retry later."""
        body = {
            "prompt": list(answer.ask.prompt),
            "max_tokens": answer.ask.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        try:
            return await self._read(answer, body)
        except httpx.ConnectError:
            if self.is_proxy_away:
                return False
            raise

    async def _read(self, answer: Answer, body: dict[str, object]) -> bool:
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code in RETRIED:
                return False
            if response.status_code != httpx.codes.OK:
                said = (await response.aread())[:300].decode(errors="replace")
                answer.error = f"HTTP {response.status_code}: {said}"
                if response.status_code == httpx.codes.INTERNAL_SERVER_ERROR and said == WORDS_OF_PROXIES:
                    answer.broken_by = "proxy"
                return True
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._take(answer, json.loads(line.removeprefix("data: ")))
        return True

    def _take(self, answer: Answer, event: dict[str, object]) -> None:
        if "error" in event:
            answer.error = json.dumps(event["error"])
            return
        answer.event_times_s.append(time.monotonic())
        self.newest_begun_s = max(self.newest_begun_s, answer.started_s)
        choices = event.get("choices")
        assert isinstance(choices, list)
        for choice in choices:
            tokens = choice.get("token_ids") or []
            answer.tokens.extend(tokens)
            self.num_tokens += len(tokens)
