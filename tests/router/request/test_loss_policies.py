"""What happens to a request whose worker or KV is lost, by configuration."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from engine.contract.messages import LoadReport
from router.pool.pool import ReplicaPool
from router.pool.replica import Replica
from router.request.kv_loss import recompute_limit
from router.roles import ROLES
from router.settings import RouterSettings
from tests.support.router.fake_workers import FakePrefillPool, counting
from tests.support.router.router_rig import FAST, RouterRig, events, router_rig, until

PROMPT = [5, 6, 7]
NUM_TOKENS = 30
ASK = {"max_tokens": NUM_TOKENS, "seed": 1, "return_token_ids": True, "ignore_eos": True}


def with_settings(**changes: Any) -> RouterSettings:
    return dataclasses.replace(FAST, **changes)


def expected(rig: RouterRig) -> list[int]:
    request = next(iter([*rig.prefill[0].seen, *rig.decode[0].seen]))
    return [counting(request, position) for position in range(NUM_TOKENS)]


async def tokens_of(rig: RouterRig) -> list[int]:
    response = await rig.complete(PROMPT, **ASK)
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


@pytest.mark.parametrize("policy", ["retry", "recompute"])
async def test_decode_computes_the_prompt_when_no_prefill_worker_is_left(model_dir: Path, policy: str) -> None:
    async with router_rig(model_dir, settings=with_settings(prefill_lost_policy=policy)) as rig:
        rig.prefill.kill("prefill-0")
        await until(lambda: not rig.service.prefill_pool.has_any())

        assert await tokens_of(rig) == expected(rig)
        assert rig.decode[0].seen[0].kv_transfer is None
        assert rig.service.counters.num_local_prefills == 1


async def test_last_prefill_worker_that_dies_with_a_prompt_leaves_it_to_decode(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=with_settings(backoff_min_s=5.0, backoff_max_s=5.0)) as rig:
        rig.prefill[0].gate.clear()
        answer = asyncio.create_task(tokens_of(rig))
        await until(lambda: bool(rig.prefill[0].running))
        rig.prefill.kill("prefill-0")

        assert await answer == expected(rig)
        assert rig.service.counters.num_local_prefills == 1


async def test_policy_recompute_asks_no_second_prefill_worker(model_dir: Path) -> None:
    settings = with_settings(prefill_lost_policy="recompute")
    async with router_rig(model_dir, num_prefill=2, settings=settings) as rig:
        rig.prefill[0].error_code = rig.prefill[1].error_code = "engine_dead"

        assert await tokens_of(rig) == expected(rig)
        assert len(rig.prefill[0].seen) + len(rig.prefill[1].seen) == 1


async def test_policy_fail_tells_of_the_first_lost_prefill_worker(model_dir: Path) -> None:
    async with router_rig(model_dir, num_prefill=2, settings=with_settings(prefill_lost_policy="fail")) as rig:
        rig.prefill[0].error_code = rig.prefill[1].error_code = "engine_dead"
        response = await rig.complete(PROMPT, **ASK)

        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (502, "prefill_failed")
        assert error["message"].startswith("prefill failed once")


async def test_policy_fail_needs_a_prefill_worker_to_accept_anything(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=with_settings(prefill_lost_policy="fail")) as rig:
        rig.prefill.kill("prefill-0")
        await until(lambda: not rig.service.prefill_pool.has_any())
        response = await rig.complete(PROMPT, **ASK)

        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_healthy_replica")


async def test_policy_fail_ends_a_stream_with_an_error_event_when_decode_is_lost(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=2, settings=with_settings(decode_lost_policy="fail")) as rig:
        rig.decode[0].die_after_tokens = 10
        chunks = events(await rig.complete(PROMPT, stream=True, **ASK))

        assert chunks[-1]["error"]["code"] == "decode_failed"
        assert "decode failed on 1 replica, at last with" in chunks[-1]["error"]["message"]
        assert rig.decode[1].seen == []


@pytest.mark.parametrize(("policy", "num_prefills"), [("retry", 2), ("recompute", 1)])
async def test_lost_kv_is_made_where_the_policy_says(model_dir: Path, policy: str, num_prefills: int) -> None:
    async with router_rig(model_dir, settings=with_settings(kv_lost_policy=policy)) as rig:
        rig.decode[0].lost_loads = 1
        chunks = events(await rig.complete(PROMPT, stream=True, **ASK))

        ids = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", [])]
        assert ids == expected(rig)
        assert len(rig.prefill[0].seen) == num_prefills
        limits = [request.max_recomputed_tokens for request in rig.decode[0].seen]
        assert limits == ([0, 0] if policy == "retry" else [None])
        await until(rig.is_at_rest)


async def test_kv_that_is_lost_again_and_again_is_computed_by_decode(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=with_settings(kv_lost_policy="retry")) as rig:
        rig.decode[0].lost_loads = 99

        assert await tokens_of(rig) == expected(rig)
        assert len(rig.prefill[0].seen) == 3
        assert [request.max_recomputed_tokens for request in rig.decode[0].seen] == [0, 0, None]


async def test_policy_fail_tells_that_the_kv_was_lost(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=with_settings(kv_lost_policy="fail")) as rig:
        rig.decode[0].lost_loads = 1
        response = await rig.complete(PROMPT, **ASK)

        assert (response.status_code, response.json()["error"]["code"]) == (502, "kv_lost")
        await until(rig.is_at_rest)


class Estimate:
    """Two pools with known speeds: 1,000 tokens a second."""

    def __init__(self, *, num_running: int = 0, queued_decode: int = 0, queued_prefill: int = 0) -> None:
        counters = {"num_scheduled_tokens": 5000.0, "step_s": 5.0}
        self.prefill = ReplicaPool(ROLES["prefill"], FakePrefillPool(1), policy="queued_tokens", settings=FAST)
        self.load = LoadReport(queued_prefill_tokens=queued_prefill, counters=counters)
        self.decode = Replica(replica_id="d")
        self.decode.load = LoadReport(num_running=num_running, queued_prefill_tokens=queued_decode)

    async def limit(self, policy: str = "cheapest") -> int | None:
        await asyncio.gather(*self.prefill.refresh())
        self.prefill.note_load("prefill-0", self.load)
        return recompute_limit(policy, prefill=self.prefill, decode=self.decode, num_prompt_tokens=500)


async def test_alone_a_decode_worker_computes_the_prompt_again() -> None:
    limit = await Estimate().limit()

    assert limit is not None
    assert limit >= 500


async def test_decode_worker_with_many_streams_gives_long_prompts_back() -> None:
    limit = await Estimate(num_running=9).limit()

    assert limit == 51  # (500 tokens + 10 ms) on prefill against ten that wait


async def test_busy_prefill_pool_makes_decode_compute_more() -> None:
    busy, idle = await Estimate(num_running=9, queued_prefill=5000).limit(), await Estimate(num_running=9).limit()

    assert busy is not None
    assert idle is not None
    assert busy > idle


async def test_without_prefill_workers_decode_computes_all() -> None:
    estimate = Estimate(num_running=9)

    assert recompute_limit("cheapest", prefill=estimate.prefill, decode=estimate.decode, num_prompt_tokens=9) is None
