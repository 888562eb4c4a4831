"""A worker that dies costs time: no request, and no token."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import psutil
import pytest

from tests.support.cluster import POLL_PERIOD_S, READY_TIMEOUT_S, ClusterProcess

NUM_REQUESTS = 6
NUM_TOKENS = 200
PROMPTS = [[3 + (7 * index + offset) % 250 for offset in range(40 + index)] for index in range(NUM_REQUESTS)]

pytestmark = pytest.mark.timeout(400)


async def complete(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
    body = {
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == httpx.codes.OK, response.text
    token_ids: list[int] = response.json()["choices"][0]["token_ids"]
    return token_ids


async def workers(client: httpx.AsyncClient, pool: str) -> list[dict[str, Any]]:
    replicas: list[dict[str, Any]] = (await client.get("/status")).json()["pools"][pool]
    return replicas


async def busy_worker(client: httpx.AsyncClient) -> dict[str, Any]:
    """A decode worker that is generating right now."""
    while True:
        for replica in await workers(client, "decode"):
            if replica["num_running"]:
                return replica


async def wait_for_replacement(client: httpx.AsyncClient, pool: str, dead_pid: int) -> None:
    """Return when the pool has its two running workers again."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while True:
        replicas = await workers(client, pool)
        if len([replica for replica in replicas if replica["state"] == "running" and replica["pid"] != dead_pid]) == 2:
            return
        assert time.monotonic() < deadline_s, replicas
        await asyncio.sleep(POLL_PERIOD_S)


async def test_decode_worker_dies_in_mid_stream(wide_cluster: ClusterProcess) -> None:
    async with httpx.AsyncClient(base_url=wide_cluster.url, timeout=120.0, trust_env=False) as client:
        undisturbed = [await complete(client, prompt) for prompt in PROMPTS]

        answers = asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))
        victim = await busy_worker(client)
        psutil.Process(victim["pid"]).kill()

        assert await answers == undisturbed
        await wait_for_replacement(client, "decode", victim["pid"])


async def test_prefill_worker_dies_under_load(wide_cluster: ClusterProcess) -> None:
    async with httpx.AsyncClient(base_url=wide_cluster.url, timeout=120.0, trust_env=False) as client:
        undisturbed = [await complete(client, prompt) for prompt in PROMPTS]

        answers = asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))
        victim = (await workers(client, "prefill"))[0]
        psutil.Process(victim["pid"]).kill()

        assert await answers == undisturbed
        assert [await complete(client, prompt) for prompt in PROMPTS] == undisturbed
        await wait_for_replacement(client, "prefill", victim["pid"])
