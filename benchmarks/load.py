"""An open-loop load over HTTP: requests leave at their own times, however slow the answers are."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import httpx


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """What to send: Poisson arrivals at ``rate`` requests/s, random prompts that share no prefix."""

    rate: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    vocab_size: int
    seed: int


@dataclass(slots=True, kw_only=True)
class Timing:
    """One request as its client measured it; all times are seconds on one clock."""

    sent: float
    kind: str = ""
    token_times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.token_times[0] - self.sent

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive events of tokens."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The results of a load, in milliseconds and tokens per second."""

    num_requests: int
    num_failed: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tokens_per_s: float


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` of the values are."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a load: when it is sent, in seconds after the start, and its content."""

    at_s: float
    kind: str
    prompt: list[int]
    num_output_tokens: int


def poisson_arrivals(spec: LoadSpec, *, kind: str = "") -> list[Arrival]:
    """The requests of ``spec``."""
    rng = random.Random(spec.seed)
    arrivals, departure = [], 0.0
    for _ in range(spec.num_requests):
        departure += rng.expovariate(spec.rate)
        prompt = [rng.randrange(1, spec.vocab_size) for _ in range(spec.num_prompt_tokens)]
        arrivals.append(Arrival(at_s=departure, kind=kind, prompt=prompt, num_output_tokens=spec.num_output_tokens))
    return arrivals


async def run_load(url: str, spec: LoadSpec) -> LoadResult:
    """Send the load to ``url`` and wait for every answer."""
    return summarise(await send_all(url, poisson_arrivals(spec)))


async def send_all(url: str, arrivals: Sequence[Arrival]) -> list[Timing]:
    """Send every request at its time, and wait for every answer."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as client:
        started = time.perf_counter()
        return await asyncio.gather(*(_send(client, arrival, started) for arrival in arrivals))


async def send_closed(url: str, arrivals: Sequence[Arrival], *, concurrency: int, seconds: float) -> list[Timing]:
    """Have this many clients send requests for ``seconds``, each its next one when its last answer has ended.

    Arrivals are taken in their order, whatever their times; answers that were begun are waited for.
    """
    waiting = iter(arrivals)
    timings: list[Timing] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as client:
        end_s = time.perf_counter() + seconds

        async def keep_asking() -> None:
            while (now_s := time.perf_counter()) < end_s and (arrival := next(waiting, None)) is not None:
                timings.append(await _send(client, replace(arrival, at_s=0.0), now_s))

        await asyncio.gather(*(keep_asking() for _ in range(concurrency)))
    return timings


async def _send(client: httpx.AsyncClient, arrival: Arrival, started: float) -> Timing:
    departure, num_tokens = started + arrival.at_s, arrival.num_output_tokens
    await asyncio.sleep(max(0.0, departure - time.perf_counter()))
    timing = Timing(sent=departure, kind=arrival.kind)
    body = {
        "prompt": arrival.prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                timing.error = (await response.aread()).decode()
                return timing
            async for line in response.aiter_lines():
                _take_line(timing, line)
    except httpx.HTTPError as error:
        timing.error = repr(error)
    if timing.num_tokens != num_tokens and timing.error is None:
        timing.error = f"{timing.num_tokens} of {num_tokens} tokens"
    return timing


def _take_line(timing: Timing, line: str) -> None:
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    event = json.loads(line[len("data: ") :])
    if "error" in event:
        timing.error = json.dumps(event["error"])
        return
    num_tokens = sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
    if num_tokens:
        timing.num_tokens += num_tokens
        timing.token_times.append(time.perf_counter())


def summarise(timings: Sequence[Timing]) -> LoadResult:
    """The figures of a load."""
    good = [timing for timing in timings if timing.error is None]
    failed = [timing.error for timing in timings if timing.error is not None]
    if not good:
        raise SystemExit(f"every request failed; the first: {failed[0]}")
    gaps = [gap for timing in good for gap in timing.gaps_s]
    first = min(timing.sent for timing in good)
    last = max(timing.token_times[-1] for timing in good)
    ttfts = [timing.ttft_s for timing in good]
    return LoadResult(
        num_requests=len(timings),
        num_failed=len(failed),
        ttft_p50_ms=statistics.median(ttfts) * 1e3,
        ttft_p99_ms=percentile(ttfts, 0.99) * 1e3,
        itl_p50_ms=statistics.median(gaps) * 1e3 if gaps else float("nan"),
        itl_p99_ms=percentile(gaps, 0.99) * 1e3,
        tokens_per_s=sum(timing.num_tokens for timing in good) / (last - first),
    )
