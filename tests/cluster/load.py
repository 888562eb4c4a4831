"""Requests whose answers are known, one after another on several lanes, while something happens to the cluster."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from engine.build import build_engine
from engine.contract.config import CacheConfig, EngineConfig, ModelConfigSource
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from engine.frontend.offline import run_requests
from tests.support.engine.oracle_cases import make_prompts

NUM_TOKENS = 48
NUM_PROMPTS = 64
NUM_LANES = 6
TIMEOUT_S = 300.0
EASY_PERIOD_S = 0.5

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAnswers:
    """Prompts, and what one engine says to each."""

    prompts: tuple[Prompt, ...]
    answers: tuple[Prompt, ...]

    @classmethod
    def of(cls, model: Path) -> KnownAnswers:
        """Ask one engine in this process."""
        prompts = tuple(itertools.chain.from_iterable(make_prompts(seed) for seed in range(NUM_PROMPTS // 16)))
        built = build_engine(
            EngineConfig(
                model=ModelConfigSource(path=model, device="cpu", dtype="float32", num_threads=2),
                cache=CacheConfig(num_blocks=2048),
            )
        )
        answers: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
        requests = [
            GenerateRequest(
                request_id=str(index),
                prompt_token_ids=TokenIds.of(prompt),
                sampling=SamplingParams(max_tokens=NUM_TOKENS),
            )
            for index, prompt in enumerate(prompts)
        ]
        try:
            for delta in run_requests(built.core, requests):
                answers[delta.request_id].extend(delta.token_ids)
        finally:
            built.core.close()
        return cls(prompts=prompts, answers=tuple(tuple(answer) for answer in answers.values()))


@dataclass(slots=True)
class Load:
    """The outcomes of the requests so far."""

    url: str
    known: KnownAnswers
    num_good: int = 0
    problems: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    num_lanes: int = NUM_LANES
    """Lanes that continue: with fewer of them, processes that start get more of the cores."""
    _is_over: bool = False

    def wait_for(self, count: int) -> None:
        """Return when so many more requests have been answered."""
        target = self.num_good + len(self.problems) + count
        deadline_s = time.monotonic() + TIMEOUT_S
        while self.num_good + len(self.problems) < target:
            assert time.monotonic() < deadline_s, f"no {count} answers in {TIMEOUT_S} s: {self}"
            time.sleep(0.05)

    async def run(self) -> None:
        """All lanes, until it is over."""
        async with httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT_S, trust_env=False) as client:
            order = itertools.cycle(range(len(self.known.prompts)))
            await asyncio.gather(*(self._lane(client, order, number) for number in range(NUM_LANES)))

    async def _lane(self, client: httpx.AsyncClient, order: Iterator[int], number: int) -> None:
        while not self._is_over and number < self.num_lanes:
            await self._ask(client, next(order))
            if self.num_lanes == 1:
                await asyncio.sleep(EASY_PERIOD_S)

    async def _ask(self, client: httpx.AsyncClient, index: int) -> None:
        body = {
            "prompt": list(self.known.prompts[index]),
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        started_s = time.monotonic()
        try:
            response = await client.post("/v1/completions", json=body)
        except httpx.TransportError as error:
            self.problems.append(f"request {index}: {error!r}")
            return
        self.slowest_s = max(self.slowest_s, time.monotonic() - started_s)
        if response.status_code != httpx.codes.OK:
            self.problems.append(f"request {index}: HTTP {response.status_code}: {response.text[:300]}")
        elif tuple(response.json()["choices"][0]["token_ids"]) != self.known.answers[index]:
            self.problems.append(f"request {index}: other tokens than one engine's")
        else:
            self.num_good += 1

    def ease(self) -> None:
        """Go on with one request at a time, and a pause after each."""
        self.num_lanes = 1

    def end(self) -> None:
        """Begin no more requests."""
        self._is_over = True


@contextmanager
def running_load(url: str, known: KnownAnswers) -> Iterator[Load]:
    """Load from a thread; afterwards every request must have had its own tokens as answer."""
    load = Load(url, known)
    thread = threading.Thread(target=lambda: asyncio.run(load.run()), name="load")
    thread.start()
    try:
        load.wait_for(NUM_LANES)
        yield load
    finally:
        load.end()
        thread.join()
    assert not load.problems, load.problems
