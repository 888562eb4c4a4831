"""A closed loop over HTTP: a number of clients, each of which sends its next request when its last answer has ended.

What is reported happened in a window in which all clients were busy. It begins when every client has had its first
answer; these have different lengths, so that the clients do not go on in step. It ends before the clients stop.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.cpu_watch import CpuWatch, spent
from benchmarks.token_stream import Answer, LoadError, StreamClient

LIMIT_S = 300.0
"""Time allowed for the first and the last answers, in addition to the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoad:
    """What to send: random prompts of token ids that share no prefix."""

    concurrency: int
    window_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    vocab_size: int
    seed: str

    def first_length(self, number: int) -> int:
        """Tokens of a client's first answer, which is not measured."""
        return max(1, self.num_output_tokens * (number + 1) // self.concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedFigures:
    """What the clients saw in the window."""

    tokens_per_s: float
    num_requests: int
    ttft_p50_ms: float
    itl_p50_ms: float
    tpot_p50_ms: float
    tokens_per_read: float
    cpu_ms_per_token: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Course:
    """The progress of a load: ``answers`` are those after the first ones, ``begin_s`` is when the window began, and
    ``cpu_s`` is the CPU time of the server's processes in the window.
    """

    load: ClosedLoad
    clock: Callable[[], float]
    num_warm: int = 0
    begin_s: float = math.inf
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    answers: list[Answer] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)

    @property
    def end_s(self) -> float:
        """When the window ends."""
        return self.begin_s + self.load.window_s

    def take_first(self) -> None:
        """Count a client's first answer. The last client's first answer begins the window."""
        self.num_warm += 1
        if self.num_warm == self.load.concurrency:
            self.begin_s = self.clock()
            self.begun.set()


async def run_closed(url: str, load: ClosedLoad, watch: CpuWatch | None = None) -> ClosedFigures:
    """Run the load and return its figures, with the CPU time that ``watch`` measures.

    Raises:
        LoadError: A request failed, the load took too long, or its window is too short.
    """
    course = await send_closed(url, load, watch=watch)
    seen = figures(course.answers, course.begin_s, course.end_s)
    num_tokens = seen.tokens_per_s * load.window_s
    return replace(seen, cpu_ms_per_token={name: cpu_s * 1e3 / num_tokens for name, cpu_s in course.cpu_s.items()})


async def send_closed(
    url: str, load: ClosedLoad, *, clock: Callable[[], float] = time.perf_counter, watch: CpuWatch | None = None
) -> Course:
    """Keep ``concurrency`` requests in flight over the window, then wait for the last answers.

    Raises:
        LoadError: A request failed, or the load took too long.
    """
    course = Course(load=load, clock=clock)
    limit_s = load.window_s + LIMIT_S
    clients = [_client(url, course, number) for number in range(load.concurrency)]
    try:
        async with asyncio.timeout(limit_s):
            await asyncio.gather(*clients, _watch(course, watch))
    except TimeoutError as error:
        num_answers = course.num_warm + len(course.answers)
        raise LoadError(f"only {num_answers} answers at concurrency {load.concurrency} in {limit_s:.0f} s") from error
    return course


async def _watch(course: Course, watch: CpuWatch | None) -> None:
    """Measure the CPU time that the server uses during the window."""
    if watch is None:
        return
    await course.begun.wait()
    before = await asyncio.to_thread(watch.take)
    await asyncio.sleep(course.load.window_s)
    course.cpu_s = spent(before, await asyncio.to_thread(watch.take))


async def _client(url: str, course: Course, number: int) -> None:
    load = course.load
    rng = random.Random(f"{load.seed}/{load.concurrency}/{number}")

    def prompt() -> list[int]:
        return [rng.randrange(1, load.vocab_size) for _ in range(load.num_prompt_tokens)]

    async with StreamClient(url) as client:
        await client.ask(prompt(), load.first_length(number))
        course.take_first()
        while course.clock() < course.end_s:
            course.answers.append(await client.ask(prompt(), load.num_output_tokens))


def figures(answers: Sequence[Answer], begin_s: float, end_s: float) -> ClosedFigures:
    """What happened from ``begin_s`` to ``end_s``: tokens that were read, and requests that were sent.

    Tokens that were read together count as evenly spread over the time since the read before.

    Raises:
        LoadError: Nothing happened: the window is too short.
    """
    num_tokens, num_reads, gaps_s = 0, 0, []
    for answer in answers:
        before = None
        for arrival in answer.arrivals:
            if begin_s <= arrival.at_s < end_s:
                num_tokens += arrival.num_tokens
                num_reads += 1
                if before is not None:
                    gaps_s += [(arrival.at_s - before.at_s) / arrival.num_tokens] * arrival.num_tokens
            before = arrival
    sent = [answer for answer in answers if begin_s <= answer.sent_s < end_s]
    tpots_s = [tpot_s for answer in sent if (tpot_s := answer.tpot_s) is not None]
    if not gaps_s or not tpots_s:
        raise LoadError(f"no answer in a window of {end_s - begin_s:.1f} s: use a longer window")
    return ClosedFigures(
        tokens_per_s=num_tokens / (end_s - begin_s),
        num_requests=len(sent),
        ttft_p50_ms=statistics.median(answer.ttft_s for answer in sent) * 1e3,
        itl_p50_ms=statistics.median(gaps_s) * 1e3,
        tpot_p50_ms=statistics.median(tpots_s) * 1e3,
        tokens_per_read=num_tokens / num_reads,
    )
