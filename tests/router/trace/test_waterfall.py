"""The parts of a request's trace follow each other and are its whole time, whichever way it takes through engines."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from engine.contract.block_hash import prompt_keys
from engine.contract.messages import CacheChanges, GenerateRequest
from engine.contract.step_time import StepTimeModel
from engine.contract.token_ids import TokenIds
from router.trace.request_trace import MAX_CHOICES
from tests.support.engine.chain_runner import expected_tokens
from tests.support.router.live_router import NUM_TOKENS, Live, live_router, token_ids
from tests.support.router.router_rig import FAST, RouterRig, router_rig, until

PROMPT = list(range(3, 40))
KNOWN = StepTimeModel(base_s=0.001, row_s=0.0001, prompt_token_s=0.0001, error=0.1, num_steps=50)
TOLERANCE_MS = 2.0
LONG = 150
"""Tokens of a request that still runs when its worker goes."""


async def trace_of(live: Live | RouterRig, answer: httpx.Response) -> dict[str, Any]:
    """The trace of an answer, whose parts must fill its time without a hole."""
    assert answer.status_code == 200, answer.text
    told = await live.client.get(f"/v1/requests/{answer.headers['x-request-id']}/trace")
    assert told.status_code == 200, told.text
    trace: dict[str, Any] = told.json()
    parts = top_level(trace)
    assert abs(sum(part["duration_ms"] for part in parts) - trace["total_ms"]) <= TOLERANCE_MS
    for before, after in itertools.pairwise(parts):
        assert after["start_ms"] == pytest.approx(before["start_ms"] + before["duration_ms"], abs=0.01)
    for span in trace["spans"]:
        assert span["parent"] is None or trace["spans"][span["parent"]]["parent"] is None
    return trace


def top_level(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [span for span in trace["spans"] if span["parent"] is None]


def names(trace: dict[str, Any]) -> list[str]:
    return [span["name"] for span in top_level(trace)]


async def test_request_that_is_handed_over(model_dir: Path) -> None:
    async with live_router(model_dir) as live:
        answer = await live.complete(PROMPT)
        trace = await trace_of(live, answer)

        assert names(trace) == ["tokenize", "queue", "prefill_queue", "prefill", "transfer", "decode"]
        where = [span["where"] for span in top_level(trace)]
        router = f"router {live.service.router_id}"
        assert where == [router, router, "prefill-0", "prefill-0", "decode-0", "decode-0"]
        assert (trace["state"], trace["finish_reason"]) == ("finished", "length")
        assert (trace["prompt_tokens"], trace["completion_tokens"]) == (len(PROMPT), len(token_ids(answer)))
        assert trace["gaps"]["count"] > 0
        assert trace["gaps"]["p50_ms"] <= trace["gaps"]["p99_ms"] <= trace["gaps"]["max_ms"]
        assert {span["name"] for span in trace["spans"]} >= {"choice", "first_token", "decode_queue"}
        [decode, prefill] = trace["choices"]
        assert decode["chosen"] == {"prefill": None, "decode": "decode-0"}
        assert prefill["chosen"] == {"prefill": "prefill-0", "decode": "decode-0"}
        assert prefill["reason"].startswith("policy ")


async def test_workers_tell_their_steps_and_what_was_moved(model_dir: Path) -> None:
    async with live_router(model_dir, chunk_tokens=16) as live:
        trace = await trace_of(live, await live.complete(PROMPT))
        inside = {
            part["name"]: [span for span in trace["spans"] if span["parent"] == index]
            for index, part in enumerate(trace["spans"])
            if part["parent"] is None
        }

        steps = [span["attributes"]["tokens"] for span in inside["prefill"] if span["name"] == "step"]
        assert steps == [16, 16, len(PROMPT) - 32]
        [moved] = [span for span in inside["transfer"] if span["name"] == "kv_transfer"]
        block_bytes = moved["attributes"]["bytes"] // moved["attributes"]["blocks"]
        assert moved["attributes"] == {"bytes": 10 * block_bytes, "blocks": 10, "source": "prefill-0"}
        assert block_bytes > 0
        assert [span["attributes"] for span in inside["transfer"] if span["name"] == "step"] == [{"tokens": 1}]
        assert {span["where"] for span in inside["prefill"] if span["name"] == "step"} == {"prefill-0"}
        assert moved["where"] == "decode-0"
        assert trace["trace_id"] is None


async def test_total_is_the_latency_that_the_router_measures(model_dir: Path) -> None:
    async with live_router(model_dir) as live:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        answer = await live.complete(PROMPT)
        client_ms = (loop.time() - started_s) * 1e3
        trace = await trace_of(live, answer)

        assert 0 < trace["ttft_ms"] <= trace["total_ms"] <= client_ms


async def test_prompt_that_the_decode_worker_computes(model_dir: Path) -> None:
    settings = dataclasses.replace(FAST, local_prefill_tokens=64)
    async with live_router(model_dir, settings=settings) as live:
        trace = await trace_of(live, await live.complete(PROMPT))

        assert names(trace) == ["tokenize", "queue", "prefill_queue", "prefill", "decode"]
        assert {span["where"] for span in top_level(trace)[2:]} == {"decode-0"}


async def test_request_that_its_drained_worker_lets_go(model_dir: Path) -> None:
    async with live_router(model_dir, num_decode=2, turns_per_step=200) as live:
        answers = [asyncio.create_task(live.complete([*PROMPT, number], max_tokens=LONG)) for number in range(4)]
        leaving = live.decode.engines["decode-0"]
        await until(lambda: leaving.load.counters["num_generated_tokens"] > 8)
        assert await leaving.drain(moves_out=True, timeout_s=60)
        traces = [await trace_of(live, await answer) for answer in answers]

        moved = [trace for trace in traces if "move" in names(trace)]
        assert moved, [names(trace) for trace in traces]
        for trace in moved:
            assert names(trace)[-3:] == ["decode", "move", "decode"]
            [move] = [span for span in top_level(trace) if span["name"] == "move"]
            assert (move["where"], move["attributes"]["reason"]) == ("decode-1", "drain")
            assert move["attributes"]["num_remote_tokens"] > 0


async def test_request_whose_worker_dies(model_dir: Path) -> None:
    async with live_router(model_dir, num_decode=2, turns_per_step=200) as live:
        asked = [[*PROMPT, number] for number in range(4)]
        answers = [asyncio.create_task(live.complete(prompt, max_tokens=LONG)) for prompt in asked]
        victim = live.decode.engines["decode-0"]
        await until(lambda: victim.load.counters["num_generated_tokens"] > 8)
        await victim.close()
        traces = []
        for prompt, answer in zip(asked, answers, strict=True):
            assert token_ids(await answer) == expected_tokens(prompt, LONG)
            traces.append(await trace_of(live, await answer))

        recovered = [trace for trace in traces if "recovery" in names(trace)]
        assert recovered
        for trace in recovered:
            assert names(trace)[-1] == "decode"
            [recovery] = [span for span in top_level(trace) if span["name"] == "recovery"]
            assert "decode-0" in recovery["attributes"]["reason"]


async def test_choice_by_predictions_tells_what_else_was_weighed(model_dir: Path) -> None:
    settings = dataclasses.replace(FAST, roles="elastic")
    async with router_rig(model_dir, num_prefill=2, num_decode=2, settings=settings) as rig:
        for replica in (*(rig.prefill[at] for at in (0, 1)), *(rig.decode[at] for at in (0, 1))):
            replica.gauges |= {"step_time": KNOWN, "counters": {"num_scheduled_tokens": 1000.0}}
        for at in (0, 1):  # so nobody generates there
            rig.prefill[at].gauges |= {"num_decoding": 30, "num_running": 30}
        await until(lambda: all(item.load.step_time == KNOWN for item in rig.service.decode_pool.replicas))
        trace = await trace_of(rig, await rig.complete(PROMPT, max_tokens=4))

        [choice] = trace["choices"]
        assert choice["reason"] in ("colocated", "apart")
        assert choice["predicted_ttft_ms"] > 0
        assert len(choice["alternatives"]) == 4
        costs = [option["predicted_cost"] for option in choice["alternatives"]]
        assert costs == sorted(costs)
        assert all(option["predicted_ttft_ms"] > 0 for option in choice["alternatives"])


async def test_split_prompt_tells_of_both_workers_and_of_what_was_predicted(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=dataclasses.replace(FAST, roles="elastic")) as rig:
        costly = StepTimeModel(base_s=0.001, row_s=0.0005, prompt_token_s=0.005, error=0.1, num_steps=50)
        for replica in (rig.prefill[0], rig.decode[0]):
            replica.gauges |= {"step_time": costly, "counters": {"num_scheduled_tokens": 1000.0}}
        rig.prefill[0].gauges |= {"num_decoding": 30, "num_running": 30}
        pool = rig.service.decode_pool
        await until(lambda: all(item.load.step_time == costly for item in pool.replicas))
        cached = list(range(5, 105))
        keys = np.array(prompt_keys(TokenIds.of(cached).array[:-1], None, 16), "<u8").tobytes()
        pool.note_cache("prefill-0", [CacheChanges(first_sequence=0, next_sequence=6, stored=keys, is_snapshot=True)])

        trace = await trace_of(rig, await rig.complete([*cached, *range(5, 155)], max_tokens=5, ignore_eos=True))

        prefills = [span for span in top_level(trace) if span["name"] == "prefill"]
        assert [span["where"] for span in prefills] == ["prefill-0", "decode-0"]
        assert prefills[0]["attributes"]["head_tokens"] == 97
        assert names(trace)[-1] == "decode"
        [choice] = trace["choices"]
        assert choice["reason"] == "split"
        assert choice["chosen"] == {"prefill": "prefill-0", "decode": "decode-0", "head_tokens": 97}
        assert choice["predicted_ttft_ms"] > 0
        assert not any("head_tokens" in option for option in choice["alternatives"])
        places = [(option["prefill"], option["decode"]) for option in choice["alternatives"]]
        assert ("prefill-0", "decode-0") in places  # the same two workers, without a cut
        assert ("decode-0", "decode-0") in places


async def test_every_choice_of_a_body_is_traced(model_dir: Path) -> None:
    async with live_router(model_dir) as live:
        answer = await live.complete(PROMPT, n=3, temperature=1.0, seed=5)
        trace = await trace_of(live, answer)

        others = trace["other_choices"]
        assert (trace["num_choices"], [other["index"] for other in others]) == (3, [1, 2])
        usage = answer.json()["usage"]
        assert (trace["prompt_tokens"], trace["completion_tokens"]) == (len(PROMPT), usage["completion_tokens"])
        for other in others:
            parts = top_level(other)
            assert abs(sum(part["duration_ms"] for part in parts) - other["total_ms"]) <= TOLERANCE_MS
            assert names(other)[:3] == ["tokenize", "first_choice", "queue"]
            assert names(other)[-1] == "decode"
            assert other["completion_tokens"] == NUM_TOKENS
        assert trace["total_ms"] == max(trace["total_ms"], *(other["total_ms"] for other in others))


async def test_request_lasts_until_its_last_choice_is_done(model_dir: Path) -> None:
    def stops_the_first(request: GenerateRequest, position: int) -> int:
        return 9 if request.sampling.seed == 1 and position == 1 else 7

    async with router_rig(model_dir, next_token=stops_the_first) as rig:
        answer = await rig.complete(PROMPT, n=2, seed=1, max_tokens=20, stop_token_ids=[9])
        trace = await trace_of(rig, answer)

        [other] = trace["other_choices"]
        assert names(trace)[-2:] == ["decode", "other_choices"]
        assert trace["total_ms"] == other["total_ms"]
        assert other["completion_tokens"] == 20 < trace["completion_tokens"]


async def test_only_so_many_choices_are_traced(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        trace = await trace_of(rig, await rig.complete(PROMPT, n=MAX_CHOICES + 3, max_tokens=2))

        assert trace["num_choices"] == MAX_CHOICES + 3
        assert len(trace["other_choices"]) == MAX_CHOICES - 1


async def test_client_that_leaves_ends_its_trace(model_dir: Path) -> None:
    async with live_router(model_dir, turns_per_step=200) as live:
        headers = {"x-request-id": "leaves"}
        body = {"prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True}
        async with live.client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            await anext(answer.aiter_bytes())
            running = (await live.client.get("/v1/requests/leaves/trace")).json()
        await until(lambda: live.service.num_alive == 0)
        ended = (await live.client.get("/v1/requests/leaves/trace")).json()

        assert (running["state"], ended["state"], ended["finish_reason"]) == ("running", "aborted", "abort")
