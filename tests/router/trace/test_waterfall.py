"""The parts of a request's trace follow each other and are its whole time, whichever way it takes through engines."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.contract.step_time import StepTimeModel
from tests.support.engine.chain_runner import expected_tokens
from tests.support.router.live_router import Live, live_router, token_ids
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
        assert await leaving.drain(moves_out=True, timeout_s=20)
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
