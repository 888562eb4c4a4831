"""Clients that leave a real cluster: none of their requests continues to compute, wait, load or hold leases."""

from __future__ import annotations

import asyncio
import contextlib
import random

import httpx
import pytest

from tests.support.cluster.cluster import ClusterProcess
from tests.support.cluster.http_completions import assert_at_rest, wait_for_rest

LONG = {"max_tokens": 900, "temperature": 0, "ignore_eos": True}
NUM_CHOICES = 128
"""As many as a step takes, so that the answer, 5 s of work for two quiet cores, is far from its end when a busy machine
gets round to looking at it, which may take a second."""
BEGIN_TIMEOUT_S = 120.0


@pytest.mark.parametrize("stream", [True, False])
async def test_one_that_leaves_is_gone(cluster: ClusterProcess, stream: bool) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, trust_env=False) as client:
        before = await asyncio.to_thread(wait_for_rest, cluster.url)
        body = {"prompt": [5] * 40, "stream": stream, "n": NUM_CHOICES, **LONG}
        answer = asyncio.create_task(client.post("/v1/completions", json=body))
        async with asyncio.timeout(BEGIN_TIMEOUT_S):
            while not (await client.get("/load")).json()["server_load"]:  # at once, where /status asks all workers
                assert not answer.done(), "the answer ended before anybody looked: it must be longer"
                await asyncio.sleep(0.01)
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)

        after = await asyncio.to_thread(wait_for_rest, cluster.url)

    assert_at_rest(after)
    new = {name: after["totals"][name] - before["totals"][name] for name in ("cancelled", "finished", "failed")}
    assert new == {"cancelled": NUM_CHOICES, "finished": 0, "failed": 0}


async def test_many_that_leave_at_random_moments_leave_nothing(cluster: ClusterProcess) -> None:
    source = random.Random(11)

    async def visit(client: httpx.AsyncClient, number: int) -> None:
        body = {"prompt": [5 + number] * source.randrange(1, 60), "stream": source.random() < 0.7, **LONG}
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(source.random() * 2.0):
                await client.post("/v1/completions", json=body)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, trust_env=False, limits=limits) as client:
        before = wait_for_rest(cluster.url)["totals"]
        after = before
        while after["cancelled"] == before["cancelled"]:  # on a busy machine few come as far as to be served
            await asyncio.gather(*(visit(client, number) for number in range(40)))
            status = await asyncio.to_thread(wait_for_rest, cluster.url)
            after = status["totals"]

    assert_at_rest(status)
    assert after["requests"] == after["finished"] + after["cancelled"] + after["failed"]
