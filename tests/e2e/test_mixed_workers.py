"""Mixed workers of a real cluster whose roles are fixed: whole requests, and what a drained decode worker leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.chaos.live_cluster import LiveCluster
from cluster.config.own_admin_key import with_own_key
from tests.support.cluster.cluster import ClusterProcess, running_cluster
from tests.support.cluster.http_completions import (
    TIMEOUT_S,
    assert_at_rest,
    complete_all,
    queue_of_work,
    read_status,
    wait_for_rest,
)

NUM_TOKENS = 400
NUM_BODIES = 6
"""As many of them keep these workers busy for 15 s on two quiet cores."""

PROMPTS = [[3 + (7 * index + offset) % 250 for offset in range(40 + index)] for index in range(12)]


@pytest.fixture
def mixed_cluster(served_model: Path) -> Iterator[ClusterProcess]:
    with running_cluster(
        model=str(served_model), dtype="float32", mixed_replicas=1, scheduler={"max_num_seqs": 8}
    ) as running:
        yield running


async def test_mixed_workers_take_whole_requests_and_the_streams_of_drained_workers(
    mixed_cluster: ClusterProcess,
) -> None:
    url, max_tokens = mixed_cluster.url, [NUM_TOKENS] * len(PROMPTS)
    undisturbed = await complete_all(url, PROMPTS, max_tokens=max_tokens)
    assert_at_rest(wait_for_rest(url))
    before = {role: rows[0] for role, rows in read_status(url)["pools"].items()}

    assert list(before) == ["prefill", "decode", "mixed"]
    assert before["decode"]["counters"]["num_transfers"] > 0
    assert before["mixed"]["counters"]["num_generated_tokens"] > NUM_TOKENS
    assert before["mixed"]["counters"]["num_transfers"] == 0, "it computes the prompts of its own streams"

    address, key = with_own_key(url, "")
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=address, headers=headers, timeout=TIMEOUT_S, trust_env=False) as client:
        cluster = LiveCluster(client, seed=0)
        running = asyncio.create_task(complete_all(url, PROMPTS, max_tokens=max_tokens))
        async with queue_of_work(client, max_tokens=NUM_TOKENS, num_bodies=NUM_BODIES) as queued:
            while not (await cluster.status())["pools"]["decode"][0]["num_decoding"]:
                assert not queued.done()
            await cluster.drain(before["decode"])
            assert await running == undisturbed
            # The worker may be slow to notice, and others' streams are moved then. They go there with their KV.
            while not has_moved(await cluster.status()):
                assert not queued.done(), "nothing has moved"


def has_moved(status: dict[str, Any]) -> bool:
    """True if streams have left a drained worker, and the mixed one has read KV."""
    mixed: dict[str, int] = status["pools"]["mixed"][0]["counters"]
    return status["totals"]["drain_moves"] > 0 < mixed["num_transfers"]
