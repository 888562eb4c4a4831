"""`baton drain` on a live cluster. What becomes of running requests is shown by tests/faults."""

from __future__ import annotations

import asyncio
import time

import httpx

from cluster.chaos.live_cluster import LiveCluster, members
from tests.support.cluster.cluster import POLL_PERIOD_S, READY_TIMEOUT_S, ClusterProcess, run_baton
from tests.support.cluster.http_completions import complete_all

NUM_TOKENS = 200
PROMPTS = [[3 + (7 * index + offset) % 250 for offset in range(40 + index)] for index in range(6)]


async def wait_for_replacement(cluster: LiveCluster, pool: str, gone_pid: int) -> None:
    """Return when the pool has its two running workers again."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while True:
        rows = members(await cluster.status(), pool)
        if len([row for row in rows if row["pid"] != gone_pid]) == 2:
            return
        assert time.monotonic() < deadline_s, rows
        await asyncio.sleep(POLL_PERIOD_S)


async def test_baton_drain_ends_a_worker_under_load_and_another_one_comes(wide_cluster: ClusterProcess) -> None:
    max_tokens, log_before = [NUM_TOKENS] * len(PROMPTS), wide_cluster.log
    async with httpx.AsyncClient(base_url=wide_cluster.url, timeout=120.0, trust_env=False) as client:
        cluster = LiveCluster(client, seed=0)
        undisturbed = await complete_all(wide_cluster.url, PROMPTS, max_tokens=max_tokens)

        answers = asyncio.create_task(complete_all(wide_cluster.url, PROMPTS, max_tokens=max_tokens))
        leaving = members(await cluster.status(), "prefill")[0]
        drained = await asyncio.to_thread(run_baton, "drain", leaving["replica_id"], "--url", wide_cluster.url)

        assert drained.returncode == 0, drained.stderr
        assert "is gone after" in drained.stdout
        assert await answers == undisturbed
        await wait_for_replacement(cluster, "prefill", leaving["pid"])
    assert "died" not in wide_cluster.log[len(log_before) :], "an orderly end is no crash"


async def test_worker_that_is_not_there_cannot_be_drained(wide_cluster: ClusterProcess) -> None:
    drained = await asyncio.to_thread(run_baton, "drain", "nobody", "--url", wide_cluster.url)

    assert drained.returncode == 1
    assert "there is no worker 'nobody'" in drained.stderr
