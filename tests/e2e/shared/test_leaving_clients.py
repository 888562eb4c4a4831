"""500 clients that leave at random moments: nothing of them remains, and others are served as before."""

from __future__ import annotations

import asyncio
import random

from tests.support.cluster.cluster import ClusterProcess
from tests.support.cluster.http_completions import assert_at_rest, complete_all, wait_for_rest
from tests.support.cluster.leaving_clients import MOMENTS, visit
from tests.support.engine.checkpoints import VOCAB_SIZE

NUM_CLIENTS = 500
MAX_TOKENS = 700
"""Large, because a client that reads slowly gets many tokens in one event; otherwise the last might come too early."""

PROMPT = [7] * 40


def prompts() -> list[list[int]]:
    source = random.Random(500)
    return [[source.randrange(3, VOCAB_SIZE) for _ in range(source.randint(20, 300))] for _ in range(NUM_CLIENTS)]


async def test_500_clients_that_leave_at_random_moments_leave_nothing(cluster: ClusterProcess) -> None:
    before = await complete_all(cluster.url, [PROMPT], max_tokens=[8])
    totals = wait_for_rest(cluster.url)["totals"]

    crowd = await visit("127.0.0.1", cluster.port, prompts=prompts(), max_tokens=MAX_TOKENS, seed=5)
    status = await asyncio.to_thread(wait_for_rest, cluster.url)

    assert not crowd.problems
    assert crowd.left == dict.fromkeys(MOMENTS, NUM_CLIENTS // len(MOMENTS))
    assert_at_rest(status)
    new = {name: status["totals"][name] - totals[name] for name in ("requests", "finished", "cancelled", "failed")}
    assert new["failed"] == 0
    # Who leaves at once may be gone before Serve passes the request on.
    assert new["cancelled"] > NUM_CLIENTS // 4
    assert new["requests"] == new["finished"] + new["cancelled"]
    assert await complete_all(cluster.url, [PROMPT], max_tokens=[8]) == before
