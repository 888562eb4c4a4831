"""What a request is promised at each worker that it comes to."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from engine.contract.promise import Promise
from router.pool.demand import Demand
from router.request.generation import Generation
from tests.support.engine.requests import greedy_request
from tests.support.loop_time import LoopTime

PROMISE = Promise(ttft_ms=2000.0, itl_ms=100.0)


async def begin(promise: Promise = PROMISE) -> Generation:
    request = replace(greedy_request("a", [5, 6, 7], max_tokens=4), promise=promise)
    now_s = asyncio.get_running_loop().time()
    return Generation(request=request, demand=Demand(request), timeout_s=60.0, deadline_s=now_s + 60.0)


async def test_a_second_worker_is_told_how_much_time_is_left_to_the_first_token() -> None:
    time, generation = LoopTime(), await begin()
    assert generation.next_run("first").promise == PROMISE

    time.advance(1.5)

    left = generation.next_run("second").promise
    assert left.ttft_ms == pytest.approx(500.0, abs=50.0)
    assert left.itl_ms == PROMISE.itl_ms
    assert generation.request.promise == PROMISE, "what was promised is what is counted"


async def test_a_promise_that_is_late_stays_one() -> None:
    time, generation = LoopTime(), await begin()
    generation.next_run("first")
    time.advance(9.0)

    again = generation.next_run("first")
    assert (again.request_id, again.promise.ttft_ms) == ("a~2", 1.0)


@pytest.mark.parametrize("promise", [Promise(itl_ms=100.0), PROMISE])
async def test_what_has_its_first_token_or_was_promised_none_is_told_the_same(promise: Promise) -> None:
    generation = await begin(promise)
    generation.next_run("first")
    generation.output_token_ids.extend([8] if promise is PROMISE else [])

    assert generation.next_run("second").promise == promise
