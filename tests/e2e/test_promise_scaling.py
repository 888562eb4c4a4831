"""A prefill pool that follows what was promised: more workers while prompts come faster than one computes them, one
again behind that, nothing lost, and the timeline says why.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from cluster.chaos.live_cluster import LiveCluster, members
from cluster.chaos.load import LoadRun, make_asks
from cluster.chaos.scenario import LoadSection
from tests.support.cluster.cluster import POLL_PERIOD_S, READY_TIMEOUT_S, ClusterProcess, running_cluster

LOAD = LoadSection(streams=12, distinct=400, prompt_tokens=(300, 500), output_tokens=(2, 4))


@pytest.fixture(scope="module")
def slow_model(served_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with so much to compute that clients and router are never what is waited for."""
    folder = tmp_path_factory.mktemp("slow")
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for file in served_model.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture
def scaled_cluster(slow_model: Path) -> Iterator[ClusterProcess]:
    """A cluster whose promises cannot be kept if requests come faster than they are served."""
    scaling = {"by": "promise", "max_replicas": 3, "window_s": 10, "down_delay_s": 10, "start_s": 5}
    with running_cluster(
        model=str(slow_model),
        dtype="float32",
        slo={"ttft_ms": 500},
        prefill={"scaling": scaling, "num_threads": 1},
        decode={"num_threads": 1},
        borrow_idle_cores=False,
    ) as running:
        yield running


async def wait_until(cluster: LiveCluster, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first status of which this is so."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while not is_so(status := await cluster.status()):
        assert time.monotonic() < deadline_s, status["pools"]["prefill"]
        await asyncio.sleep(POLL_PERIOD_S)
    return status


def has_grown(status: dict[str, Any]) -> bool:
    return len(members(status, "prefill")) > 1


def is_small_again(status: dict[str, Any]) -> bool:
    """True if one worker runs, and none was ordered meanwhile."""
    return len(members(status, "prefill")) == 1 == status["scaling"]["last_changes"][-1]["wanted"]


async def timeline(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """The timeline of the live page."""
    async with client.stream("GET", "/admin/events") as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                entries: list[dict[str, Any]] = json.loads(line.removeprefix("data: "))["timeline"]
                return entries
    raise AssertionError("the stream ended before it began")


async def test_prefill_pool_follows_the_promise(scaled_cluster: ClusterProcess) -> None:
    async with httpx.AsyncClient(base_url=scaled_cluster.url, timeout=120.0, trust_env=False) as client:
        cluster = LiveCluster(client, seed=0)
        asks = make_asks(LOAD)
        many, few = LoadRun(client, asks, num_streams=LOAD.streams), LoadRun(client, asks[:8], num_streams=1)

        many.start()
        await wait_until(cluster, has_grown)
        await many.finish()
        changes = (await wait_until(cluster, is_small_again))["scaling"]["last_changes"]
        told = [entry for entry in await timeline(client) if entry["kind"] == "scale"]
        undisturbed = await few.once()

    assert [answer.error for answer in many.answers if answer.error] == []
    assert all(answer.tokens == undisturbed[answer.ask] for answer in many.answers if answer.ask in undisturbed)
    assert len(told) == len(changes) >= 2
    assert "requests/s are expected" in told[0]["text"]
    assert any(reason in told[-1]["text"] for reason in ("would have been enough", "no requests came")), told
