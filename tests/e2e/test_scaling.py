"""A decode pool that follows its KV usage: to two workers and back to one under load, without an error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.chaos.live_cluster import LiveCluster, members
from cluster.chaos.load import LoadRun, make_asks
from cluster.chaos.scenario import LoadSection
from tests.support.cluster.cluster import POLL_PERIOD_S, READY_TIMEOUT_S, ClusterProcess, running_cluster

LOAD = LoadSection(streams=16, distinct=20, prompt_tokens=(60, 120), output_tokens=(100, 200))


@pytest.fixture
def scaled_cluster(served_model: Path) -> Iterator[ClusterProcess]:
    """Little KV memory, so that a small load fills it."""
    scaling = {"max_replicas": 2, "target_kv_usage": 0.2, "look_back_s": 11, "up_delay_s": 1, "down_delay_s": 5}
    with running_cluster(
        model=str(served_model), dtype="float32", cache={"num_blocks": 300}, decode={"scaling": scaling}
    ) as running:
        yield running


async def wait_for_decode_workers(cluster: LiveCluster, number: int) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while len(rows := members(await cluster.status(), "decode")) != number:
        assert time.monotonic() < deadline_s, rows
        await asyncio.sleep(POLL_PERIOD_S)


async def wait_for_wanted_decode_workers(client: httpx.AsyncClient, number: int) -> None:
    """Wait for the number of wanted workers in /metrics, which alerts compare with the number of running ones. A router
    that gets no answer in time shows the last number that it knew.
    """
    deadline_s, wanted = time.monotonic() + READY_TIMEOUT_S, list[float]()
    while wanted != [number]:
        assert time.monotonic() < deadline_s, wanted
        lines = (await client.get("/metrics")).text.splitlines()
        wanted = [float(line.split()[-1]) for line in lines if line.startswith('baton:replicas_wanted{role="decode"}')]
        await asyncio.sleep(POLL_PERIOD_S)


@pytest.mark.known_failure(24)
async def test_decode_pool_grows_and_shrinks_with_its_load(scaled_cluster: ClusterProcess) -> None:
    async with httpx.AsyncClient(base_url=scaled_cluster.url, timeout=120.0, trust_env=False) as client:
        cluster = LiveCluster(client, seed=0)
        asks = make_asks(LOAD)
        undisturbed = await LoadRun(client, asks, num_streams=4).once()
        many, few = LoadRun(client, asks, num_streams=16), LoadRun(client, asks, num_streams=1, pause_s=0.2)

        many.start()
        await wait_for_decode_workers(cluster, 2)
        await wait_for_wanted_decode_workers(client, 2)
        few.start()
        await many.finish()
        await wait_for_decode_workers(cluster, 1)
        await wait_for_wanted_decode_workers(client, 1)
        await few.finish()

    answers = [*many.answers, *few.answers]
    assert [answer.error for answer in answers if answer.error] == []
    assert all(answer.tokens == undisturbed[answer.ask] for answer in answers)
