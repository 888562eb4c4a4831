"""More requests than allowed: each is turned away with a 429, as early as that is known, and counted as that."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from tests.support.router.router_rig import FAST, RouterRig, router_rig, until

PROMPT = [5, 6, 7]
ASK = {"max_tokens": 40, "ignore_eos": True}


def num_finishes(rig: RouterRig) -> dict[str, float]:
    rows = next(item.rows for item in rig.service.metrics.families() if item.name == "baton:request_finishes")
    return {row.labels[0][1]: row.value for row in rows}


@pytest.mark.parametrize("fields", [{"max_tokens": 3}, {"max_tokens": 3, "n": 2}, {"max_tokens": 2000}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_refusal_at_the_door_comes_before_the_tokenizer(
    model_dir: Path, path: str, fields: dict[str, int]
) -> None:
    # Far too long: whoever looked at the text would say so.
    text = "the quick brown fox " * 10_000
    body = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    async with router_rig(model_dir, settings=dataclasses.replace(FAST, max_num_requests=2)) as rig:
        rig.prefill[0].gate.clear()
        answer = asyncio.create_task(rig.complete(PROMPT, **ASK, n=2))
        await until(lambda: rig.service.num_alive == 2)
        refused = await rig.client.post(path, json={**body, **fields})
        rig.prefill[0].gate.set()

        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert rig.service.counters.num_refused == fields.get("n", 1)
        assert (await answer).status_code == 200


@pytest.mark.parametrize("fields", [{"n": 3}, {"best_of": 3}, {"beam_width": 3}, {"prompt": ["a", "b", "c"]}])
async def test_choices_that_never_fit_are_no_reason_to_try_again(model_dir: Path, fields: dict[str, object]) -> None:
    async with router_rig(model_dir, settings=dataclasses.replace(FAST, max_num_requests=2)) as rig:
        refused = await rig.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **fields})

    assert refused.status_code == 400
    assert "retry-after" not in refused.headers
    assert refused.json()["error"]["message"].endswith(" 3 choices, the limit is 2")
    assert refused.json()["error"]["param"] == next(iter(fields))


@pytest.mark.parametrize("is_stream", [False, True])
async def test_full_queue_for_kv_memory_is_a_refusal_and_no_failure(model_dir: Path, is_stream: bool) -> None:
    async with router_rig(model_dir, settings=dataclasses.replace(FAST, max_num_queued=0)) as rig:
        rig.decode[0].num_blocks = 4
        await until(lambda: rig.service.decode_pool.replicas[0].load.num_blocks == 4)
        rig.prefill[0].gate.clear()
        answer = asyncio.create_task(rig.complete(PROMPT, **ASK))
        await until(lambda: bool(rig.prefill[0].running))
        refused = await rig.complete(PROMPT, **ASK, stream=is_stream)
        rig.prefill[0].gate.set()

        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert (await answer).status_code == 200
        await until(rig.is_at_rest)
        counters = rig.service.counters
        assert (counters.num_refused, counters.num_failed, counters.num_finished) == (1, 0, 1)
        assert num_finishes(rig) == {"stop": 0, "length": 1, "error": 0, "abort": 0}
