"""How long a large JSON body blocks the event loop, and so every other request of that router.

`python -m benchmarks.large_bodies --json FILE`: for the worst 8 MB of each kind, the longest time that the loop did not
run while the body was read as the API reads it, beside what validating it at once takes; and the same for the largest
bodies that are still taken.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import Message

from benchmarks.report import Row, add_json_option, publish
from router.api.bodies.chat_body import ChatBody
from router.api.bodies.completion_body import CompletionBody
from router.api.http.json_size import exact_size
from router.api.http.request_body import read_body
from router.api.http.value_bound import weight
from router.body_room import BodyRoom
from router.errors import RouterError
from router.settings import RouterSettings

NUM_BYTES = 8_000_000
REPEATS = 3
TICK_S = 0.0005

Body = tuple[type[BaseModel], str, str, str]

KINDS: dict[str, Body] = {
    "token ids": (CompletionBody, '{"prompt":[', "1", "]}"),
    "lists": (CompletionBody, '{"prompt":[', "[1]", "]}"),
    "objects": (CompletionBody, '{"prompt":"a","user":[', "{}", "]}"),
    "messages": (ChatBody, '{"messages":[', '{"role":"user","content":""}', "]}"),
    "text": (CompletionBody, '{"prompt":"', "a{[", '"}'),
}
"""The body's class, its beginning, what it repeats, and its end."""


def body_of(kind: str, *, num_items: int) -> bytes:
    """A body that repeats an item."""
    _, start, item, end = KINDS[kind]
    return (start + ",".join([item] * num_items) + end).encode()


def largest(kind: str, num_bytes: int) -> bytes:
    """A body of this many bytes."""
    return body_of(kind, num_items=num_bytes // (len(KINDS[kind][2]) + 1))


async def longest_gap_s(work: Callable[[], Awaitable[object]]) -> tuple[float, str]:
    """The longest time for which the loop was blocked, and how the work ended."""
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        last = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(10 * TICK_S)
    longest = 0.0
    try:
        await work()
        outcome = "taken"
    except (RouterError, ValidationError) as error:
        outcome = getattr(error, "code", "refused after validation")
    await asyncio.sleep(2 * TICK_S)
    ticking.cancel()
    await asyncio.gather(ticking, return_exceptions=True)
    return longest, str(outcome)


def request_of(raw: bytes) -> Request:
    """The request that carries a body."""

    async def receive() -> Message:
        return {"type": "http.request", "body": raw, "more_body": False}

    headers = [(b"content-type", b"application/json")]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)


async def measure(kind: str, raw: bytes, *, settings: RouterSettings) -> Row:
    """One kind of body, read both ways; the best of several repetitions of each."""
    model = KINDS[kind][0]
    room = BodyRoom(max_bytes=settings.max_reading_bytes, wait_s=settings.reading_wait_s, retry_after_s=1.0)

    async def at_once() -> None:
        model.model_validate_json(raw)

    async def as_the_api() -> None:
        async with read_body(request_of(raw), model, settings=settings, room=room):
            pass

    before = [await longest_gap_s(at_once) for _ in range(REPEATS)]
    now = [await longest_gap_s(as_the_api) for _ in range(REPEATS)]
    return Row(
        name=f"{kind}, {len(raw) / 1e6:.1f} MB",
        value=min(gap for gap, _ in now) * 1e3,
        unit="ms",
        detail={"validated_at_once_ms": min(gap for gap, _ in before) * 1e3, "outcome": now[0][1]},
    )


def largest_taken(kind: str, settings: RouterSettings) -> bytes:
    """The largest body of a kind that is not refused before validation, found by bisection."""

    low, high = 1, NUM_BYTES // (len(KINDS[kind][2]) + 1)
    while low < high:
        middle = (low + high + 1) // 2
        if weight(exact_size(body_of(kind, num_items=middle))) <= settings.max_body_values:
            low = middle
        else:
            high = middle - 1
    return body_of(kind, num_items=low)


async def measure_all() -> list[Row]:
    """All kinds: the worst bodies that may be sent, and the largest that are accepted."""
    settings = RouterSettings()
    rows = [await measure(kind, largest(kind, NUM_BYTES), settings=settings) for kind in KINDS]
    for kind in KINDS:
        if kind != "text":
            rows.append(await measure(kind, largest_taken(kind, settings), settings=settings))  # noqa: PERF401
    return rows


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    options = parser.parse_args()
    rows = asyncio.run(measure_all())
    publish(
        rows,
        packages=("pydantic", "starlette", "numpy"),
        json_file=options.json,
        title="Longest stop of the event loop while one body is read",
    )


if __name__ == "__main__":
    main()
