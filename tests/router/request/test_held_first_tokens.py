"""A first token after which another worker continues waits for the next one, as long as the promises allow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.promise import NO_PROMISE, Promise
from engine.contract.token_ids import TokenIds
from router.request.generation import Generation
from router.trace.origin import Origin
from tests.support.router.router_rig import FAST, RouterRig, events, router_rig, until

BOTH = Promise(ttft_ms=60_000.0, itl_ms=50.0)


@pytest.fixture
async def rig(model_dir: Path) -> AsyncIterator[RouterRig]:
    """A router over engines, in which the worker that continues after the first token waits until the test opens its
    gate.
    """
    async with router_rig(model_dir) as made:
        made.decode[0].step_gate.clear()
        yield made
        made.decode[0].step_gate.set()


def start(rig: RouterRig, promise: Promise) -> Generation:
    request = GenerateRequest(
        request_id=f"r-{promise}",
        prompt_token_ids=TokenIds.of(range(3, 20)),
        sampling=SamplingParams(max_tokens=4, ignore_eos=True),
        promise=promise,
    )
    origin = Origin(request_id="r", answer_id="", owner="", endpoint="/v1/completions", received_s=time.perf_counter())
    (generation,) = rig.service._orchestrator.start_choices([[request]], timeout_s=60.0, origin=origin)
    return generation


async def handed_over(rig: RouterRig) -> None:
    await until(lambda: bool(rig.decode[0].running))


async def num_taken(generation: Generation) -> int:
    return sum(len(delta.token_ids) for delta in await generation.take())


async def test_both_promises_let_it_wait_for_the_next_token(rig: RouterRig) -> None:
    generation = start(rig, BOTH)
    taking = asyncio.create_task(num_taken(generation))
    await handed_over(rig)
    assert generation.trace is not None
    assert (taking.done(), len(generation.output_token_ids), generation.trace.first_token_s) == (False, 1, None)

    rig.decode[0].step_gate.set()

    assert await taking >= 2
    assert generation.trace.first_token_s is not None


async def test_it_waits_no_longer_than_what_was_promised_for_it_allows(rig: RouterRig) -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    generation = start(rig, replace(BOTH, ttft_ms=300.0))

    assert await num_taken(generation) == 1

    assert loop.time() - began_s >= 0.9 * 0.3
    assert generation.trace is not None
    assert generation.trace.first_token_s is not None
    (shown,) = (part for part in generation.trace.parts if part.name == "first_token")
    assert shown.start_s == generation.trace.first_token_s


@pytest.mark.parametrize("promise", [NO_PROMISE, Promise(itl_ms=50.0), Promise(ttft_ms=60_000.0)], ids=str)
async def test_it_is_sent_at_once_where_either_was_not_promised(rig: RouterRig, promise: Promise) -> None:
    assert await num_taken(start(rig, promise)) == 1


async def test_it_is_sent_at_once_where_what_was_promised_for_it_is_past(rig: RouterRig) -> None:
    """Or so close to it that writing would take the rest of the time."""
    assert await num_taken(start(rig, replace(BOTH, ttft_ms=20.0))) == 1


async def test_it_is_sent_at_once_where_the_settings_say_so(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=replace(FAST, hold_first_tokens=False)) as rig:
        rig.decode[0].step_gate.clear()
        assert await num_taken(start(rig, BOTH)) == 1
        rig.decode[0].step_gate.set()


async def test_whoever_leaves_meanwhile_frees_everything(rig: RouterRig) -> None:
    generation = start(rig, BOTH)
    await handed_over(rig)

    generation.cancel()

    rig.decode[0].step_gate.set()
    await until(rig.is_at_rest)


async def test_it_comes_with_those_of_a_worker_that_took_over(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=2) as rig:
        for replica in rig.decode.replicas.values():
            replica.step_gate.clear()
        generation = start(rig, BOTH)
        taking = asyncio.create_task(num_taken(generation))
        await until(lambda: any(replica.running for replica in rig.decode.replicas.values()))
        victim = next(name for name, replica in rig.decode.replicas.items() if replica.running)

        rig.decode.kill(victim)
        for replica in rig.decode.replicas.values():
            replica.step_gate.set()

        assert await taking >= 2
        while await generation.take():
            pass
        assert len(generation.output_token_ids) == 4


async def test_what_was_computed_of_a_prompt_is_there_for_a_choice_that_overtakes_the_first_one(
    model_dir: Path,
) -> None:
    """The second choice ends with its first token, which nothing holds back; its echo tells of the prompt's tokens."""
    stop = 50

    def next_token(request: GenerateRequest, position: int) -> int:
        return stop if request.sampling.seed == 1 else stop + 1

    body = {"n": 2, "seed": 0, "max_tokens": 4, "echo": True, "logprobs": 1, "stop_token_ids": [stop], "stream": True}
    async with router_rig(model_dir, next_token=next_token) as rig:
        rig.decode[0].step_gate.clear()
        slo = {"ttft_ms": BOTH.ttft_ms, "itl_ms": BOTH.itl_ms}
        answering = asyncio.create_task(rig.complete("hello", **body, slo=slo))
        await handed_over(rig)
        await until(lambda: rig.service.num_alive == 1)
        rig.decode[0].step_gate.set()
        choices = [choice for event in events(await answering) for choice in event["choices"]]

    num_prompt_tokens = len(rig.prefill[0].seen[0].prompt_token_ids)
    for index, num_output_tokens in ((0, 4), (1, 1)):
        told = [item["logprobs"]["tokens"] for item in choices if item["index"] == index and item["logprobs"]]
        assert sum(map(len, told)) == num_prompt_tokens + num_output_tokens, index
