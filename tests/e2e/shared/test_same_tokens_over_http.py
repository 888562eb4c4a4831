"""I1 over HTTP: prefilled in one process, carried by NIXL, decoded in another, and the same tokens as transformers.

The parity matrix (tests/parity) asks the same of engines in one process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.parity.columns import ONE_ENGINE
from tests.parity.features import FEATURES
from tests.support.cluster.cluster import POLL_PERIOD_S, ClusterProcess, running_cluster
from tests.support.cluster.http_completions import TIMEOUT_S, assert_at_rest, complete_all, read_status, wait_for_rest
from tests.support.cluster.standing_still import standing_still
from tests.support.engine.oracle_cases import BLOCK_SIZE, NUM_TOKENS, OracleCase
from tests.support.parity.answers import assert_same, read_answer
from tests.support.parity.world import world

CaseOf = Callable[[str], OracleCase]


async def assert_same_tokens(url: str, case: OracleCase) -> None:
    tokens = await complete_all(url, case.prompts, max_tokens=[NUM_TOKENS] * len(case.prompts))
    assert tuple(tokens) == case.expected


async def until_decode_reads_along(url: str) -> None:
    """Wait until decode holds blocks for prompts that are not computed yet."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (await asyncio.to_thread(read_status, url))["pools"]["decode"][0]["num_held_blocks"]:
        assert time.monotonic() < deadline_s, "decode was never told of the prompts"
        await asyncio.sleep(POLL_PERIOD_S)


async def test_windowed_layers_in_many_chunks_say_what_transformers_says(oracle_case: CaseOf) -> None:
    """Prefill takes up to 22 steps for a prompt and tells decode of each, which reads along meanwhile.

    Two of three layers have a window of 40 tokens, so that blocks leave it while the prompt is computed. All
    architectures: the same without HTTP, in tests/integration/test_same_tokens.py. Workers have met before, and prefill
    begins only once decode has asked for what it will compute: else it might be done before anybody reads along. It
    reports so seldom that the router trusts it when the prompts come, however busy the machine is.
    """
    case = oracle_case("qwen2")
    settings = {
        "scheduler": {"max_num_batched_tokens": 128},
        "prefill": {"scheduler": {"max_num_batched_tokens": 32, "max_num_seqs": 32}},
        "kv_transfer": {"streamed": True},  # the default tells of nothing that takes less than 50 ms to compute
        "router": {"report_period_s": 5.0, "unresponsive_after_s": 60.0, "stream_silence_timeout_s": 60.0},
    }
    with running_cluster(model=str(case.path), dtype="float32", **settings) as cluster:
        await complete_all(cluster.url, [range(1, 200)], max_tokens=[2])
        async with standing_still(read_status(cluster.url)["pools"]["prefill"][0]["pid"]):
            answering = asyncio.create_task(assert_same_tokens(cluster.url, case))
            await until_decode_reads_along(cluster.url)
        await answering

        status = await asyncio.to_thread(wait_for_rest, cluster.url)
        assert_at_rest(status)
        assert 0 < status["totals"]["streamed_blocks"] <= status["totals"]["transferred_blocks"]


async def test_the_bytes_of_every_prompt_crossed_to_decode(cluster: ClusterProcess, oracle_case: CaseOf) -> None:
    case = oracle_case("llama")
    before = read_status(cluster.url)
    await assert_same_tokens(cluster.url, case)
    after = await asyncio.to_thread(wait_for_rest, cluster.url)

    moved = {
        name: after["totals"][name] - before["totals"][name] for name in ("transferred_bytes", "remote_hit_tokens")
    }
    block_bytes = after["pools"]["decode"][0]["block_bytes"]
    num_prompt_blocks = sum(-(-len(prompt) // BLOCK_SIZE) for prompt in case.prompts)
    assert 0 < moved["transferred_bytes"] <= num_prompt_blocks * block_bytes
    assert moved["transferred_bytes"] % block_bytes == 0
    local = after["pools"]["decode"][0]["counters"]["prefix_hit_tokens"]
    local -= before["pools"]["decode"][0]["counters"]["prefix_hit_tokens"]
    assert moved["remote_hit_tokens"] + local == sum(len(prompt) for prompt in case.prompts)
    assert_at_rest(after)


@pytest.mark.behaviour("I1")
async def test_all_features_at_once_are_answered_as_by_one_engine(cluster: ClusterProcess, served_model: Path) -> None:
    before = read_status(cluster.url)["totals"]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as client:
        calls = [client.post(feature.url, json=feature.body) for feature in FEATURES]
        answers = [read_answer(response) for response in await asyncio.gather(*calls)]
    after = await asyncio.to_thread(wait_for_rest, cluster.url)  # what a stop string ended is let go of a moment later

    async with world(served_model, ONE_ENGINE.setup) as one_engine:
        for feature, answer in zip(FEATURES, answers, strict=True):
            expected = await one_engine.ask(feature)
            assert_same({**answer, "model": expected["model"]}, expected, where=feature.name)
    assert after["totals"]["transferred_blocks"] > before["transferred_blocks"]
    assert_at_rest(after)


async def test_two_workers_of_each_kind_say_the_same(wide_cluster: ClusterProcess, oracle_case: CaseOf) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    were_all_asked = False
    while not were_all_asked:
        assert time.monotonic() < deadline_s, "a worker was never asked"
        await assert_same_tokens(wide_cluster.url, oracle_case("llama"))
        pools = read_status(wide_cluster.url)["pools"]
        were_all_asked = all(replica["counters"]["num_requests"] for pool in pools.values() for replica in pool)
    assert_at_rest(await asyncio.to_thread(wait_for_rest, wide_cluster.url))
