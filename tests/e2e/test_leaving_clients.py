"""500 clients that leave at random moments: nothing of them stays anywhere, and others are served as before."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from tests.support.cluster.cluster import ClusterProcess
from tests.support.cluster.http_completions import assert_at_rest, complete_all, read_status
from tests.support.cluster.leaving_clients import MOMENTS, visit
from tests.support.engine.checkpoints import VOCAB_SIZE

NUM_CLIENTS = 500
MAX_TOKENS = 300
PROMPT = [7] * 40
REST_TIMEOUT_S = 60.0


def prompts() -> list[list[int]]:
    source = random.Random(500)
    return [[source.randrange(3, VOCAB_SIZE) for _ in range(source.randint(20, 600))] for _ in range(NUM_CLIENTS)]


async def rest(url: str) -> dict[str, Any]:
    """The status as soon as no router has anything to do; the test fails when that does not become so."""
    async with asyncio.timeout(REST_TIMEOUT_S):
        while True:
            status = await asyncio.to_thread(read_status, url)
            rows = [row for pool in status["pools"].values() for row in pool]
            if not any(row["num_held_blocks"] or row["num_leased_blocks"] for row in rows) and not any(
                router["server_load"] for router in status["routers"]
            ):
                return status
            await asyncio.sleep(0.1)


async def test_500_clients_that_leave_at_random_moments_leave_nothing(cluster: ClusterProcess) -> None:
    before = await complete_all(cluster.url, [PROMPT], max_tokens=[8])
    totals = read_status(cluster.url)["totals"]

    crowd = await visit("127.0.0.1", cluster.port, prompts=prompts(), max_tokens=MAX_TOKENS, seed=5)
    status = await rest(cluster.url)

    assert not crowd.problems
    assert crowd.left == dict.fromkeys(MOMENTS, NUM_CLIENTS // len(MOMENTS))
    assert_at_rest(status)
    new = {name: status["totals"][name] - totals[name] for name in ("requests", "finished", "cancelled", "failed")}
    assert new["failed"] == 0
    # Who leaves at once may be gone before Serve passes the request on.
    assert new["cancelled"] > NUM_CLIENTS // 4
    assert new["requests"] == new["finished"] + new["cancelled"]
    assert await complete_all(cluster.url, [PROMPT], max_tokens=[8]) == before
