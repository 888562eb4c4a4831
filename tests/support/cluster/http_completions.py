"""Completions over HTTP as the tests of a running cluster ask for them: token ids in, token ids out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

TIMEOUT_S = 240.0


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


def assert_at_rest(status: dict[str, Any]) -> None:
    """I2: no worker runs, waits for, loads, or holds anything."""
    names = ("num_running", "num_waiting", "num_loading", "num_leased_blocks", "num_held_blocks")
    for replica in (*status["pools"]["prefill"], *status["pools"]["decode"]):
        assert {name: replica[name] for name in names} == dict.fromkeys(names, 0), replica
        assert replica["num_free_blocks"] == replica["num_blocks"], replica
        assert replica["counters"]["num_integrity_failures"] == 0, replica
