"""The engine behind asyncio: streams by client, refusals, aborts, and what happens at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from engine.contract.block_hash import KEY_BYTES
from engine.contract.config import SchedulerConfig
from engine.contract.errors import EngineDeadError, PromptTooLongError
from engine.contract.messages import CacheChanges, FinishReason, StepMessage
from engine.contract.step import PendingStep, SchedulerOutput
from engine.frontend.async_engine import AsyncEngine
from engine.frontend.client_stream import ENGINE_DEAD
from engine.frontend.engine_core import EngineCore
from engine.frontend.feeds import MAX_WAITING_BYTES, CacheFeed
from tests.support.engine.chain_engine import chain_engine
from tests.support.engine.chain_runner import expected_tokens
from tests.support.engine.local_client import run_to_end
from tests.support.engine.pausable_runner import PausableRunner
from tests.support.engine.requests import greedy_request

PERIOD_S = 0.05


@pytest.fixture
async def engine(core: EngineCore, runner: PausableRunner) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(lambda: core)
    await engine.start()
    yield engine
    runner.let_go()
    await engine.close()


async def read_until_finished(stream: AsyncIterator[StepMessage], request_ids: set[str]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
    unfinished = set(request_ids)
    async for message in stream:
        for delta in message.deltas:
            tokens[delta.request_id].extend(delta.token_ids)
            if delta.finish_reason is not None:
                unfinished.remove(delta.request_id)
        if not unfinished:
            break
    return tokens


async def test_one_request_is_awaited_to_its_end(engine: AsyncEngine) -> None:
    delta = await run_to_end(engine, greedy_request("a", [5, 6, 7], max_tokens=9))

    assert list(delta.token_ids) == expected_tokens([5, 6, 7], 9)
    assert delta.finish_reason is FinishReason.LENGTH


async def test_each_client_gets_its_own_tokens(engine: AsyncEngine) -> None:
    streams = {client: engine.outputs(client) for client in ("left", "right")}
    for stream in streams.values():
        await anext(stream)
    prompts = {f"{client}-{n}": [n, n + 1, n + 2] for client in streams for n in range(4)}
    requests = [
        greedy_request(request_id, prompt, max_tokens=6, client_id=request_id.split("-")[0])
        for request_id, prompt in prompts.items()
    ]

    answers = await engine.submit(requests)

    assert answers == [None] * len(requests)
    for client, stream in streams.items():
        mine = {request_id for request_id in prompts if request_id.startswith(client)}
        tokens = await read_until_finished(stream, mine)
        assert tokens == {request_id: expected_tokens(prompts[request_id], 6) for request_id in mine}


async def test_a_refusal_reaches_the_caller_and_spares_the_others(engine: AsyncEngine) -> None:
    stream = engine.outputs("c")
    await anext(stream)

    answers = await engine.submit(
        [
            greedy_request("long", [1] * 500, max_tokens=4, client_id="c"),
            greedy_request("good", [1, 2], max_tokens=4, client_id="c"),
        ]
    )

    assert isinstance(answers[0], PromptTooLongError)
    assert await read_until_finished(stream, {"good"}) == {"good": expected_tokens([1, 2], 4)}


async def test_closing_a_stream_aborts_what_its_client_asked_for(
    core: EngineCore, engine: AsyncEngine, runner: PausableRunner
) -> None:
    stream = engine.outputs("gone")
    await anext(stream)
    runner.hold()
    await engine.submit([greedy_request("endless", [1, 2, 3], max_tokens=100, client_id="gone")])
    await asyncio.to_thread(runner.wait_entered)

    await stream.aclose()
    runner.let_go()
    await engine.abort([])

    assert not core.has_unfinished()
    assert core.stats().scheduler.num_aborted == 1


async def test_cancelling_a_caller_aborts_its_request(
    core: EngineCore, engine: AsyncEngine, runner: PausableRunner
) -> None:
    runner.hold()
    task = asyncio.create_task(run_to_end(engine, greedy_request("endless", [1, 2, 3], max_tokens=100)))
    await asyncio.to_thread(runner.wait_entered)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    runner.let_go()
    await engine.abort([])

    assert not core.has_unfinished()
    assert core.stats().scheduler.num_aborted == 1


async def test_caller_that_is_cancelled_before_its_command_is_run_costs_nobody_else_anything(
    core: EngineCore, engine: AsyncEngine, runner: PausableRunner
) -> None:
    runner.hold()
    running = asyncio.create_task(run_to_end(engine, greedy_request("a", [1, 2, 3], max_tokens=4)))
    await asyncio.to_thread(runner.wait_entered)
    commands = [
        asyncio.create_task(engine.abort(["nobody"])),
        asyncio.create_task(engine.submit([greedy_request("b", [4, 5], max_tokens=4, client_id="gone")])),
    ]
    await asyncio.sleep(0)

    for command in commands:
        command.cancel()
    await asyncio.gather(*commands, return_exceptions=True)
    runner.let_go()

    assert list((await running).token_ids) == expected_tokens([1, 2, 3], 4)
    engine.check_health()


async def test_abort_is_done_though_its_caller_was_cancelled(
    core: EngineCore, engine: AsyncEngine, runner: PausableRunner
) -> None:
    runner.hold()
    running = asyncio.create_task(run_to_end(engine, greedy_request("a", [1, 2, 3], max_tokens=100)))
    await asyncio.to_thread(runner.wait_entered)
    abort = asyncio.create_task(engine.abort(["a"]))
    await asyncio.sleep(0)

    abort.cancel()
    await asyncio.gather(abort, return_exceptions=True)
    runner.let_go()
    await engine.abort([])

    assert not core.has_unfinished()
    assert core.stats().scheduler.num_aborted == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_an_idle_engine_reports_its_load_every_period() -> None:
    engine = AsyncEngine(chain_engine, report_period_s=0.01)
    await engine.start()
    stream = engine.outputs("idle")

    messages = [await anext(stream) for _ in range(3)]

    assert [message.load.num_free_blocks for message in messages] == [64] * 3
    await engine.close()


async def test_a_failing_step_ends_every_request_with_an_error(core: EngineCore, engine: AsyncEngine) -> None:
    class BrokenRunner:
        def launch(self, output: SchedulerOutput) -> PendingStep:
            raise RuntimeError("the device fell off")

    core.runner = BrokenRunner()

    delta = await run_to_end(engine, greedy_request("a", [1, 2, 3], max_tokens=4))

    assert delta.finish_reason is FinishReason.ERROR
    assert delta.error is not None
    assert delta.error.code == "engine_dead"
    with pytest.raises(EngineDeadError, match="the device fell off"):
        engine.check_health()
    with pytest.raises(EngineDeadError):
        await engine.submit([greedy_request("b", [1], max_tokens=1, client_id="c")])


async def test_close_ends_what_is_unfinished(engine: AsyncEngine, runner: PausableRunner) -> None:
    runner.hold()
    task = asyncio.create_task(run_to_end(engine, greedy_request("a", [1, 2], max_tokens=100)))
    await asyncio.to_thread(runner.wait_entered)

    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    runner.let_go()
    await closing

    assert (await task).error == ENGINE_DEAD


async def next_cache_changes(stream: AsyncIterator[StepMessage]) -> CacheChanges:
    async for message in stream:
        if message.cache:
            return message.cache[-1]
    raise AssertionError("the stream ended")


@pytest.fixture
async def mirrored_engine() -> AsyncIterator[AsyncEngine]:
    scheduler = SchedulerConfig(max_num_seqs=16, enable_cache_events=True)
    engine = AsyncEngine(lambda: chain_engine(scheduler=scheduler), report_period_s=PERIOD_S)
    await engine.start()
    yield engine
    await engine.close()


async def test_stream_with_a_mirror_begins_with_a_snapshot_and_goes_on_with_changes(
    mirrored_engine: AsyncEngine,
) -> None:
    await run_to_end(mirrored_engine, greedy_request("before", range(8), max_tokens=2))
    stream = mirrored_engine.outputs("router", mirrors_cache=True)
    snapshot = await next_cache_changes(stream)
    await run_to_end(mirrored_engine, greedy_request("after", range(20, 28), max_tokens=2))
    change = await next_cache_changes(stream)

    assert (snapshot.is_snapshot, len(snapshot.stored)) == (True, 2 * KEY_BYTES)
    assert (change.is_snapshot, len(change.stored)) == (False, 2 * KEY_BYTES)
    assert change.first_sequence == snapshot.next_sequence


async def test_mirror_that_asks_gets_a_snapshot_again(mirrored_engine: AsyncEngine) -> None:
    stream = mirrored_engine.outputs("router", mirrors_cache=True)
    assert (await next_cache_changes(stream)).is_snapshot
    mirrored_engine.resync_cache("router")
    mirrored_engine.resync_cache("nobody")

    assert (await next_cache_changes(stream)).is_snapshot


async def test_stream_without_a_mirror_says_nothing_of_the_cache(mirrored_engine: AsyncEngine) -> None:
    stream = mirrored_engine.outputs("router")
    await run_to_end(mirrored_engine, greedy_request("a", range(8), max_tokens=2))

    assert [(await anext(stream)).cache for _ in range(3)] == [(), (), ()]


def test_feed_that_nobody_reads_forgets_what_a_snapshot_will_tell() -> None:
    feed = CacheFeed()
    feed.needs_snapshot = False
    for number in range(3):
        feed.put(CacheChanges(first_sequence=number, next_sequence=number + 1, stored=bytes(MAX_WAITING_BYTES // 2)))

    assert feed.needs_snapshot
    assert feed.take() == ()
