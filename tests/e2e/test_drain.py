"""A worker that is drained on a live cluster: its requests go on elsewhere, and nothing is computed twice."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.e2e.test_worker_death import PROMPTS, busy_worker, complete, wait_for_replacement, workers
from tests.support.cluster import ClusterProcess, run_baton
from tests.support.http_completions import complete_all, read_status

pytestmark = pytest.mark.timeout(400)


def totals(cluster: ClusterProcess) -> dict[str, Any]:
    counted: dict[str, Any] = read_status(cluster.url)["totals"]
    return counted


LONG_PROMPTS = [[3 + (7 * index + offset) % 250 for offset in range(40 + index)] for index in range(24)]


async def test_drained_decode_worker_hands_its_requests_over(wide_cluster: ClusterProcess) -> None:
    max_tokens = [400] * len(LONG_PROMPTS)
    async with httpx.AsyncClient(base_url=wide_cluster.url, timeout=120.0, trust_env=False) as client:
        undisturbed = await complete_all(wide_cluster.url, LONG_PROMPTS, max_tokens=max_tokens)
        before = totals(wide_cluster)

        answers = asyncio.create_task(complete_all(wide_cluster.url, LONG_PROMPTS, max_tokens=max_tokens))
        leaving = await busy_worker(client)
        order = await client.post("/admin/drain", json={"replica": leaving["replica_id"]})

        assert order.json() == {"draining": leaving["replica_id"]}
        assert await answers == undisturbed
        after = totals(wide_cluster)
        assert after["drain_moves"] > before["drain_moves"]
        for name in ("migrations", "recomputed_tokens", "failed", "failed_loads"):
            assert after[name] == before[name], name
        await wait_for_replacement(client, "decode", leaving["pid"])


async def test_drained_prefill_worker_is_replaced(wide_cluster: ClusterProcess) -> None:
    async with httpx.AsyncClient(base_url=wide_cluster.url, timeout=120.0, trust_env=False) as client:
        undisturbed = [await complete(client, prompt) for prompt in PROMPTS]

        answers = asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))
        leaving = (await workers(client, "prefill"))[0]
        drained = await asyncio.to_thread(
            run_baton, "drain", leaving["replica_id"], "--url", wide_cluster.url, timeout_s=120
        )

        assert drained.returncode == 0, drained.stderr
        assert "is gone after" in drained.stdout
        assert await answers == undisturbed
        await wait_for_replacement(client, "prefill", leaving["pid"])


async def test_worker_that_is_not_there_cannot_be_drained(wide_cluster: ClusterProcess) -> None:
    drained = await asyncio.to_thread(run_baton, "drain", "nobody", "--url", wide_cluster.url)

    assert drained.returncode == 1
    assert "no worker is 'nobody'" in drained.stderr
