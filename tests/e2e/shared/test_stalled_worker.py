"""A worker that is stopped (SIGSTOP) gets no more requests within two report periods, and is used again later."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import psutil
import pytest

from router.settings import RouterSettings
from tests.support.cluster.cluster import POLL_PERIOD_S, READY_TIMEOUT_S, ClusterProcess
from tests.support.cluster.standing_still import standing_still

PERIOD_S = RouterSettings().report_period_s
NUM_AFTER = 12
LAST_REPORT_S = 0.25
"""Its last report may still have been on its way."""


async def complete(client: httpx.AsyncClient, number: int) -> None:
    prompt = [3 + (7 * number + offset) % 250 for offset in range(12)]
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == httpx.codes.OK, response.text


async def both_workers(client: httpx.AsyncClient, pool: str) -> dict[int, dict[str, Any]]:
    """The two workers of a pool by their process ids, once both run and answer."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while True:
        replicas = (await client.get("/status")).json()["pools"][pool]
        running = {replica["pid"]: replica for replica in replicas if replica["state"] == "running"}
        if len(running) == 2:
            return running
        assert time.monotonic() < deadline_s, replicas
        await asyncio.sleep(POLL_PERIOD_S)


@pytest.mark.parametrize("pool", ["decode", "prefill"])
async def test_stalled_worker_gets_nothing_after_two_report_periods(wide_cluster: ClusterProcess, pool: str) -> None:
    async with httpx.AsyncClient(base_url=wide_cluster.url, timeout=120.0, trust_env=False) as client:
        before = await both_workers(client, pool)
        victim = next(iter(before))
        early: list[asyncio.Task[None]] = []
        async with standing_still(victim) as since_s:
            # Requests of the first two periods may go there, and then wait.
            while time.monotonic() < since_s + 2 * PERIOD_S + LAST_REPORT_S:
                early.append(asyncio.create_task(complete(client, len(early))))
                await asyncio.sleep(PERIOD_S / 4)

            # Whoever asks later is answered while it stands still, so nobody's request went there.
            await asyncio.gather(*(complete(client, 100 + number) for number in range(NUM_AFTER)))
            assert psutil.Process(victim).status() == psutil.STATUS_STOPPED
        await asyncio.gather(*early)

        taken = (await both_workers(client, pool))[victim]["counters"]["num_requests"]
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        number = 1000
        while (await both_workers(client, pool))[victim]["counters"]["num_requests"] <= taken:
            assert time.monotonic() < deadline_s, "it never took part again"
            await asyncio.gather(*(complete(client, number + index) for index in range(4)))
            number += 4
