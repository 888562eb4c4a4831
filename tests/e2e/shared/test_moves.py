"""A stream is moved between real workers while it runs, by an operator's order."""

from __future__ import annotations

import asyncio
import time

import httpx

from cluster.chaos.live_cluster import LiveCluster, members
from cluster.config.own_admin_key import with_own_key
from tests.support.cluster.cluster import READY_TIMEOUT_S, ClusterProcess
from tests.support.cluster.http_completions import complete_all

NUM_TOKENS = 400
PROMPT = [3 + (7 * offset) % 250 for offset in range(60)]


async def test_stream_that_is_told_to_leave_goes_on_at_the_other_worker(wide_cluster: ClusterProcess) -> None:
    undisturbed = await complete_all(wide_cluster.url, [PROMPT], max_tokens=[NUM_TOKENS])
    url, key = with_own_key(wide_cluster.url, "")
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120.0, trust_env=False) as client:
        cluster = LiveCluster(client, seed=0)
        totals = before = (await cluster.status())["totals"]
        names = [row["replica_id"] for row in members(await cluster.status(), "decode")]

        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while totals["ordered_moves"] == before["ordered_moves"]:  # a stream may end before the order comes
            assert time.monotonic() < deadline_s
            answers = asyncio.create_task(complete_all(wide_cluster.url, [PROMPT], max_tokens=[NUM_TOKENS]))
            num_moved = 0
            while not num_moved and not answers.done():
                for source, target in (names, names[::-1]):
                    told = await client.post("/admin/move", json={"replica": source, "to": target})
                    assert told.status_code == 200, told.text
                    num_moved += told.json()["num_streams"]
            assert await answers == undisturbed
            totals = (await cluster.status())["totals"]

    assert totals["migrations"] == before["migrations"]
