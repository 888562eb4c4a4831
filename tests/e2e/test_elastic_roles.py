"""Elastic workers of a real cluster: a worker leaves the work of its own role to the other one while it runs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.cluster import ClusterProcess, run_baton, running_cluster
from tests.support.cluster.http_completions import TIMEOUT_S, complete_all, read_status, wait_for_rest

NUM_TOKENS = 150
PROMPTS = [[3 + (7 * index + offset) % 250 for offset in range(40 + index)] for index in range(4)]


@pytest.fixture
def elastic_cluster(served_model: Path) -> Iterator[ClusterProcess]:
    """A policy is named, so that always those are chosen that lean to the work.

    So are they only while they are heard: a worker may report late, as far as this router is concerned.
    """
    router = {"decode_policy": "queued_tokens", "report_period_s": 3.0}
    with running_cluster(model=str(served_model), dtype="float32", roles="elastic", router=router) as running:
        yield running


def workers(url: str) -> dict[str, dict[str, Any]]:
    """The worker that was started with each role."""
    return {role: rows[0] for role, rows in read_status(url)["pools"].items()}


async def lean(cluster: ClusterProcess, replica_id: str, role: str) -> None:
    """Give the order by the command."""
    done = await asyncio.to_thread(run_baton, "lean", replica_id, role, "--url", cluster.url)
    assert done.returncode == 0, done.stderr
    assert f"leans to {role}" in done.stdout


async def until_each_does_its_work(url: str) -> int:
    """A router that has just started may not know the decode worker yet, so that prompts continue where they are.

    Returns:
        How many the decode worker took over.
    """
    async with asyncio.timeout(TIMEOUT_S):
        for index in itertools.count():
            await complete_all(url, [[200 + index % 50] * 8], max_tokens=[2])
            wait_for_rest(url)
            if num_transfers := workers(url)["decode"]["counters"]["num_transfers"]:
                break
    return int(num_transfers)


async def test_workers_swap_their_roles_while_streams_run(elastic_cluster: ClusterProcess) -> None:
    url, max_tokens = elastic_cluster.url, [NUM_TOKENS] * len(PROMPTS)
    num_transfers = await until_each_does_its_work(url)
    undisturbed = await complete_all(url, PROMPTS, max_tokens=max_tokens)
    wait_for_rest(url)
    before = workers(url)
    assert before["decode"]["counters"]["num_transfers"] > num_transfers
    assert before["prefill"]["counters"]["num_transfers"] == 0

    running = asyncio.create_task(complete_all(url, PROMPTS, max_tokens=max_tokens))
    await lean(elastic_cluster, before["decode"]["replica_id"], "prefill")
    await lean(elastic_cluster, before["prefill"]["replica_id"], "decode")
    assert await running == undisturbed
    other_prompts = [prompt[::-1] for prompt in PROMPTS]
    swapped = await complete_all(url, other_prompts, max_tokens=max_tokens)
    wait_for_rest(url)

    after = workers(url)
    assert {role: row["leaning"] for role, row in after.items()} == {"prefill": "decode", "decode": "prefill"}
    assert after["prefill"]["pid"] == before["prefill"]["pid"]
    assert after["prefill"]["counters"]["num_transfers"] > 0
    assert after["decode"]["counters"]["num_leases_done"] > 0

    await lean(elastic_cluster, before["decode"]["replica_id"], "decode")
    await lean(elastic_cluster, before["prefill"]["replica_id"], "prefill")
    assert await complete_all(url, other_prompts, max_tokens=max_tokens) == swapped
