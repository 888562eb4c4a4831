"""Completions over HTTP as the tests of a running cluster ask for them: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import httpx

TIMEOUT_S = 240.0
REST_TIMEOUT_S = 120.0
BUSY = ("num_running", "num_waiting", "num_loading", "num_leased_blocks")


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


def read_status(url: str) -> dict[str, Any]:
    """What ``/status`` says now."""
    response = httpx.get(f"{url}/status", timeout=TIMEOUT_S, trust_env=False)
    assert response.status_code == httpx.codes.OK, response.text
    status: dict[str, Any] = response.json()
    return status


def is_at_rest(status: dict[str, Any]) -> bool:
    """True when no worker does anything for anybody."""
    return not any(replica[name] for pool in status["pools"].values() for replica in pool for name in BUSY)


async def until_rest(url: str) -> None:
    """Wait until nothing of anybody's is left; what became of it is counted."""
    deadline_s = time.monotonic() + REST_TIMEOUT_S
    while not is_at_rest(await asyncio.to_thread(read_status, url)):
        assert time.monotonic() < deadline_s, "requests that ended are still there"
        await asyncio.sleep(0.02)


def assert_at_rest(status: dict[str, Any]) -> None:
    """I2: no worker runs, waits for, loads, or holds anything."""
    names = ("num_running", "num_waiting", "num_loading", "num_leased_blocks", "num_held_blocks")
    for replica in (*status["pools"]["prefill"], *status["pools"]["decode"]):
        assert {name: replica[name] for name in names} == dict.fromkeys(names, 0), replica
        assert replica["num_free_blocks"] == replica["num_blocks"], replica
        assert replica["counters"]["num_integrity_failures"] == 0, replica
