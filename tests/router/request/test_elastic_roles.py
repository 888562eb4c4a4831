"""Elastic workers: which one gets a request, the effect of an order to lean, and that nothing is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.contract.step_time import StepTimeModel
from router.api.app import build_app
from router.service import RouterService
from router.settings import RouterSettings
from tests.support.engine.chain_runner import expected_tokens
from tests.support.engine.engine_pools import engine_pools
from tests.support.router.router_rig import FAST, router_rig, until

ELASTIC = replace(FAST, roles="elastic")
BY_LEANING = replace(ELASTIC, decode_policy="queued_tokens")
NUM_TOKENS = 20
ASK = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
KNOWN = StepTimeModel(base_s=0.001, row_s=0.0001, prompt_token_s=0.0001, error=0.1, num_steps=50)


async def test_order_to_lean_reaches_the_worker_and_status_tells(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=ELASTIC) as rig:
        answers = [
            (await rig.client.post("/admin/lean", json={"replica": "decode-0", "role": "prefill"})).json()
            for _ in range(2)
        ]

        assert answers == [
            {"replica": "decode-0", "role": "prefill", "before": "decode"},
            {"replica": "decode-0", "role": "prefill", "before": "prefill"},
        ]
        pools = (await rig.client.get("/status")).json()["pools"]
        assert {role: [row["leaning"] for row in rows] for role, rows in pools.items()} == {
            "prefill": ["prefill"],
            "decode": ["prefill"],
        }


async def test_router_that_was_told_to_lean_a_worker_goes_by_it_at_once(model_dir: Path) -> None:
    """Its next report may come half a second later, and requests may come before it."""
    async with router_rig(model_dir, settings=BY_LEANING) as rig:
        administration = rig.service.administration

        for role in ("prefill", "decode"):
            await administration.lean("decode-0", role)

            _, replica = administration._find("decode-0")
            assert (replica.leaning, replica.load.leaning) == (role, role)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"replica": "nobody", "role": "prefill"}, 404, "replica_not_found"),
        ({"replica": "decode-0", "role": "both"}, 400, "invalid_parameter"),
    ],
)
async def test_bad_orders_to_lean_are_refused(model_dir: Path, body: dict[str, str], status: int, code: str) -> None:
    async with router_rig(model_dir, settings=ELASTIC) as rig:
        answer = await rig.client.post("/admin/lean", json=body)

        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_fixed_roles_do_not_lean(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        answer = await rig.client.post("/admin/lean", json={"replica": "decode-0", "role": "prefill"})

        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "roles_are_fixed")
        assert "roles: elastic" in answer.json()["error"]["message"]


async def test_while_nothing_can_be_predicted_each_does_what_it_leans_to(model_dir: Path) -> None:
    async with router_rig(model_dir, num_prefill=2, num_decode=2, settings=ELASTIC) as rig:
        for _ in range(3):
            assert (await rig.complete(max_tokens=4)).status_code == 200

        assert sum(len(replica.seen) for replica in rig.prefill.replicas.values()) == 3
        assert sum(len(replica.seen) for replica in rig.decode.replicas.values()) == 3
        assert rig.service.counters.num_placed_models_unknown == 3
        await until(rig.is_at_rest)


async def test_predictions_keep_a_request_on_one_worker_and_are_counted(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=ELASTIC) as rig:
        for replica in (rig.decode[0], rig.prefill[0]):
            replica.gauges |= {"step_time": KNOWN, "counters": {"num_scheduled_tokens": 1000.0}}
        rig.prefill[0].gauges |= {"num_decoding": 30, "num_running": 30}
        await until(lambda: all(item.load.step_time == KNOWN for item in rig.service.decode_pool.replicas))

        assert (await rig.complete(max_tokens=4)).status_code == 200

        assert [item.kv_transfer for item in rig.decode[0].seen] == [None]
        assert rig.service.counters.num_placed_colocated == 1
        lines = (await rig.client.get("/metrics")).text.splitlines()
        told = [line for line in lines if line.startswith("baton:placements_total{") and 'reason="colocated"' in line]
        assert [line.split()[-1] for line in told] == ["1.0"]
        assert (await rig.client.get("/status")).json()["totals"]["placed_colocated"] == 1
        await until(rig.is_at_rest)


async def test_a_single_token_is_asked_of_whoever_is_least_busy(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=ELASTIC) as rig:
        for replica in (rig.decode[0], rig.prefill[0]):
            replica.gauges |= {"step_time": KNOWN, "counters": {"num_scheduled_tokens": 1000.0}}
        rig.prefill[0].gauges |= {"queued_prefill_tokens": 5000, "num_waiting": 1}
        await until(lambda: all(item.load.step_time == KNOWN for item in rig.service.decode_pool.replicas))

        assert (await rig.complete(max_tokens=1)).status_code == 200

        assert (len(rig.prefill[0].seen), len(rig.decode[0].seen)) == (0, 1)
        await until(rig.is_at_rest)


async def test_a_decode_worker_computes_the_prompt_when_prefill_workers_are_gone(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=ELASTIC) as rig:
        rig.prefill.kill("prefill-0")

        assert (await rig.complete(max_tokens=4)).status_code == 200
        await until(rig.is_at_rest)


@pytest.mark.parametrize("settings", [ELASTIC, BY_LEANING], ids=["predicted", "by leaning"])
async def test_same_tokens_while_leanings_change_all_the_time(model_dir: Path, settings: RouterSettings) -> None:
    async with engine_pools(num_prefill=2, num_decode=2, are_elastic=True) as (prefill, decode):
        service = RouterService(model_dir, "tiny", {"prefill": prefill, "decode": decode}, settings)
        await service.start()
        try:
            transport = httpx.ASGITransport(build_app(service))
            async with httpx.AsyncClient(transport=transport, base_url="http://router", timeout=60) as client:
                prompts = [[index + 1] * (5 + 3 * index) for index in range(16)]
                bodies: list[dict[str, Any]] = [{"prompt": prompt, **ASK} for prompt in prompts]
                answers = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
                names = (*prefill.engines, *decode.engines)
                for index in range(12):
                    await service.administration.lean(names[index % len(names)], ("prefill", "decode")[index % 2])
                for prompt, answer in zip(prompts, await asyncio.gather(*answers), strict=True):
                    assert answer.json()["choices"][0]["token_ids"] == expected_tokens(prompt, NUM_TOKENS)
            loads = [engine for pool in (prefill, decode) for engine in pool.engines.values()]
            await until(lambda: all(item.load.is_empty and not item.load.num_held_blocks for item in loads))
        finally:
            await service.close()
