"""Completions over HTTP for tests of a running cluster: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

TIMEOUT_S = 240.0
REST_POLL_PERIOD_S = 0.05
NUM_QUEUED = 120
QUEUED_LENGTH = 90
HELD = ("num_running", "num_waiting", "num_loading", "num_leased_blocks", "num_held_blocks")


async def complete_all(
    url: str, prompts: Sequence[Sequence[int]], *, max_tokens: Sequence[int], one_at_a_time: bool = False, **extra: Any
) -> list[tuple[int, ...]]:
    """The output tokens for each prompt; all requests at once unless asked otherwise."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as client:
        calls = [_complete(client, prompt, count, extra) for prompt, count in zip(prompts, max_tokens, strict=True)]
        if one_at_a_time:
            return [await call for call in calls]
        return list(await asyncio.gather(*calls))


async def _complete(
    client: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int, extra: dict[str, Any]
) -> tuple[int, ...]:
    body = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **extra,
    }
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == httpx.codes.OK, response.text
    answer = response.json()
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert answer["choices"][0]["finish_reason"] == "length"
    return tuple(answer["choices"][0]["token_ids"])


@asynccontextmanager
async def queue_of_work(
    client: httpx.AsyncClient, *, max_tokens: int, num_bodies: int = 1
) -> AsyncIterator[asyncio.Future[list[httpx.Response]]]:
    """Bodies of many prompts each, which keep the decode workers busy after the requests that were sent before them.

    Yields their answers. Their client leaves at the end of the block. For orders that must reach a worker amid its
    work: a cluster may answer a few streams alone before this process, which may stand still for seconds on a busy
    machine, can ask anything else.
    """
    prompts = [[5 + number] * QUEUED_LENGTH for number in range(NUM_QUEUED)]
    body = {"prompt": prompts, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    queued = asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(num_bodies)))
    try:
        yield queued
        refused = [answer.text for answer in queued.result() if answer.is_error] if queued.done() else []
        assert not refused
    finally:
        queued.cancel()
        await asyncio.wait((queued,))


def read_status(url: str) -> dict[str, Any]:
    """The current answer of ``/status``."""
    response = httpx.get(f"{url}/status", timeout=TIMEOUT_S, trust_env=False)
    assert response.status_code == httpx.codes.OK, response.text
    status: dict[str, Any] = response.json()
    return status


def wait_for_rest(url: str) -> dict[str, Any]:
    """The status once nothing is in progress (``assert_at_rest``), or the last one if that does not happen in time.

    A client has its answer a moment before the workers are told that it is over, and hear that its blocks were read.
    Where clients left, call it in a thread: their connections are closed by their event loop.
    """
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_at_rest(status := read_status(url)) and time.monotonic() < deadline_s:
        time.sleep(REST_POLL_PERIOD_S)
    return status


def is_at_rest(status: dict[str, Any]) -> bool:
    """True if no router and no worker has work, or holds anything."""
    rows = [row for pool in status["pools"].values() for row in pool]
    return not (
        any(router["server_load"] for router in status["routers"])
        or any(row[name] for row in rows for name in HELD)
        or any(row["num_free_blocks"] != row["num_blocks"] for row in rows)
    )


def assert_at_rest(status: dict[str, Any]) -> None:
    """I2: no worker runs, waits for, loads or holds anything."""
    for replica in [row for pool in status["pools"].values() for row in pool]:
        assert {name: replica[name] for name in HELD} == dict.fromkeys(HELD, 0), replica
        assert replica["num_free_blocks"] == replica["num_blocks"], replica
        assert replica["counters"]["num_integrity_failures"] == 0, replica
