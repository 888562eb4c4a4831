"""Routers learn of each other's requests as soon as these arrive, not when the current step has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from engine.contract.messages import LoadReport, StepMessage
from engine.frontend.arrivals import Arrivals, changes_queues
from engine.frontend.async_engine import AsyncEngine
from kv_transfer.params import KVTransferParams, PeerIdentity
from tests.support.engine.chain_engine import chain_engine
from tests.support.engine.pausable_runner import PausableRunner
from tests.support.engine.requests import greedy_request

LOAD, LATER = LoadReport(num_waiting=1, queued_prefill_tokens=5), LoadReport(num_waiting=2, queued_prefill_tokens=8)
PROMPT = [1, 2, 3]
REQUEST = greedy_request("a", PROMPT, max_tokens=4, client_id="sender")
MOVED = replace(
    greedy_request("b", PROMPT, max_tokens=4, client_id="sender"),
    kv_transfer=KVTransferParams(
        protocol_version=4,
        source=PeerIdentity(engine_id="prefill", incarnation="1"),
        lease_id="b",
        layout_hash="",
        block_ids=((1,),),
        num_tokens=3,
    ),
)


def queue_told_to(arrivals: Arrivals, client_id: str, load: LoadReport = LOAD) -> tuple[int, int]:
    told = arrivals.told_to(client_id, load, told=load)
    return told.num_waiting, told.queued_prefill_tokens


def test_others_are_told_of_a_request_until_a_report_counts_it() -> None:
    arrivals = Arrivals()
    arrivals.come([REQUEST])
    assert queue_told_to(arrivals, "other") == (2, 8)
    assert queue_told_to(arrivals, "sender") == (1, 5), "it counts its own until it has an answer"

    arrivals.answered([REQUEST], added=[REQUEST], before=LOAD)
    assert queue_told_to(arrivals, "other") == (2, 8), "what the engine reported last was before it"
    assert queue_told_to(arrivals, "sender") == (2, 8), "its answer is on its way, and it counts it no more"
    assert queue_told_to(arrivals, "other", LATER) == queue_told_to(arrivals, "sender", LATER) == (2, 8)


def test_what_was_refused_is_told_to_nobody_any_more() -> None:
    arrivals = Arrivals()
    arrivals.come([REQUEST, MOVED])
    assert queue_told_to(arrivals, "other") == (3, 8), "of a prompt that was computed elsewhere nothing waits"

    arrivals.answered([REQUEST, MOVED], added=[MOVED], before=LOAD)
    assert queue_told_to(arrivals, "other") == (2, 5), "the engine has the other one"


def test_what_comes_within_several_steps_is_told_as_long_as_it_is_not_counted() -> None:
    arrivals = Arrivals()
    for load in (LOAD, LATER):
        for request in (REQUEST, replace(REQUEST, client_id="other")):
            arrivals.come([request])
            arrivals.answered([request], added=[request], before=load)
        told = arrivals.told_to("third", load, told=load)
        assert told.num_waiting == load.num_waiting + 2
        assert told.queued_prefill_tokens == load.queued_prefill_tokens + 6
    assert queue_told_to(arrivals, "third", replace(LATER)) == (2, 8)


@pytest.mark.parametrize("what", ["num_waiting", "num_running", "num_loading"])
def test_requests_that_come_begin_or_leave_are_news(what: str) -> None:
    assert changes_queues(LOAD, replace(LOAD, **{what: 7}))
    assert not changes_queues(LOAD, replace(LOAD, num_context_tokens=1, queued_prefill_tokens=2))


async def until(stream: AsyncIterator[StepMessage], is_told: Callable[[LoadReport], bool]) -> LoadReport:
    async with asyncio.timeout(60):
        async for message in stream:
            if is_told(message.load):
                return message.load
    raise AssertionError("the stream ended")


class BusyEngine:
    """An engine inside a step, and what another client than the sender receives."""

    def __init__(self) -> None:
        core = chain_engine()
        core.runner = self.runner = PausableRunner(core.runner)
        self.engine = AsyncEngine(lambda: core, report_period_s=3600.0)
        self.other = self.engine.outputs("other")

    async def begin(self) -> None:
        await self.engine.start()
        await anext(self.other)
        self.runner.hold()
        await self.engine.submit([greedy_request("first", PROMPT, max_tokens=2, client_id="sender")])
        await asyncio.to_thread(self.runner.wait_entered)


@pytest.fixture
async def busy() -> AsyncIterator[BusyEngine]:
    busy = BusyEngine()
    await busy.begin()
    yield busy
    busy.runner.let_go()
    await busy.engine.close()


async def test_a_request_that_comes_within_a_step_is_told_at_once(busy: BusyEngine) -> None:
    coming = asyncio.create_task(busy.engine.submit([REQUEST]))
    load = await until(busy.other, lambda load: load.num_waiting == 2)
    assert load.queued_prefill_tokens == 2 * len(PROMPT), "the first one's step has not ended either"
    assert not coming.done(), "the step still runs"

    busy.runner.let_go()
    assert await coming == [None]
    assert (await until(busy.other, lambda load: load.is_empty)).queued_prefill_tokens == 0


async def test_a_caller_that_gives_up_leaves_nothing_told(busy: BusyEngine) -> None:
    coming = asyncio.create_task(busy.engine.submit([REQUEST]))
    await until(busy.other, lambda load: load.num_waiting == 2)

    coming.cancel()
    await asyncio.gather(coming, return_exceptions=True)
    busy.runner.let_go()
    assert (await until(busy.other, lambda load: load.is_empty)).queued_prefill_tokens == 0
