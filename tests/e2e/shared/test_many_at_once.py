"""64 requests of mixed lengths at once give what they give one at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support.cluster.cluster import ClusterProcess
from tests.support.cluster.http_completions import assert_at_rest, complete_all, wait_for_rest
from tests.support.engine.checkpoints import VOCAB_SIZE

NUM_REQUESTS = 64

SAMPLED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95, "seed": 11, "frequency_penalty": 0.2}


def mixed_requests() -> tuple[list[list[int]], list[int]]:
    rng = random.Random(64)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 400))] for _ in range(NUM_REQUESTS)]
    return prompts, [rng.randint(1, 48) for _ in prompts]


@pytest.mark.parametrize("parameters", ({}, SAMPLED), ids=("greedy", "sampled"))
async def test_all_at_once_is_one_at_a_time(
    parameters: dict[str, Any], cluster: ClusterProcess, wide_cluster: ClusterProcess
) -> None:
    prompts, max_tokens = mixed_requests()

    alone = await complete_all(cluster.url, prompts, max_tokens=max_tokens, one_at_a_time=True, **parameters)
    together = await complete_all(cluster.url, prompts, max_tokens=max_tokens, **parameters)
    spread = await complete_all(wide_cluster.url, prompts, max_tokens=max_tokens, **parameters)

    assert together == alone
    assert spread == alone
    for url in (cluster.url, wide_cluster.url):
        assert_at_rest(wait_for_rest(url))
