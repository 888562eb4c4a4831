"""What the engine's thread sends to a router: immediately if it may, otherwise together, and never by waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from engine.contract.config import SchedulerConfig
from engine.contract.messages import CacheChanges, FinishReason, LoadReport, StepMessage, TokenDelta
from engine.contract.step_frame import unpack_step
from engine.frontend.async_engine import AsyncEngine
from engine.frontend.feeds import MAX_WAITING_BYTES, CacheFeed
from engine.frontend.outbox import Outbox
from tests.support.engine.chain_engine import chain_engine
from tests.support.engine.chain_runner import expected_tokens
from tests.support.engine.pausable_runner import PausableRunner
from tests.support.engine.requests import greedy_request

FOR_EVER_S = 3600.0
LOAD = LoadReport(num_blocks=8)
SNAPSHOT = CacheChanges(first_sequence=0, next_sequence=4, stored=b"all", is_snapshot=True)
CHANGES = CacheChanges(first_sequence=4, next_sequence=5, stored=b"one")


class Reader:
    """A sink that takes frames while it may, and keeps count of them."""

    def __init__(self) -> None:
        self.messages: list[StepMessage] = []
        self.is_behind = False
        self._taken = asyncio.Event()
        self._came = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def send(self, frame: bytes) -> None:
        self.messages.append(unpack_step(frame))
        self._loop.call_soon_threadsafe(self._came.set)

    async def drained(self) -> None:
        while self.is_behind:
            await self._taken.wait()

    def take_all(self) -> None:
        """It is not behind any more."""
        self.is_behind = False
        self._taken.set()

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each message that has some."""
        return [[token for delta in item.deltas for token in delta.token_ids] for item in self.messages if item.deltas]

    async def wait_for(self, num_messages: int) -> None:
        async with asyncio.timeout(60):
            while len(self.messages) < num_messages:
                self._came.clear()
                await self._came.wait()

    async def wait_for_end(self) -> None:
        async with asyncio.timeout(60):
            while not any(delta.finish_reason for item in self.messages for delta in item.deltas):
                self._came.clear()
                await self._came.wait()


def delta(token: int, *, is_first: bool = False, reason: FinishReason | None = None) -> TokenDelta:
    return TokenDelta("a", (token,), reason, num_cached_tokens=0 if is_first else None)


@pytest.fixture
async def reader() -> Reader:
    return Reader()


def outbox_of(reader: Reader, *, min_gap_s: float = 0.0, mirrors_cache: bool = False) -> Outbox:
    cache = CacheFeed() if mirrors_cache else None
    return Outbox(reader, lambda: LOAD, cache=cache, min_gap_s=min_gap_s)


async def test_a_step_is_sent_before_the_call_returns_with_the_load(reader: Reader) -> None:
    outbox = outbox_of(reader)

    await asyncio.to_thread(outbox.put, [delta(1)])

    assert reader.tokens == [[1]]
    assert reader.messages[0].load == LOAD


async def test_steps_that_follow_at_once_share_a_message_and_first_tokens_do_not_wait(reader: Reader) -> None:
    outbox = outbox_of(reader, min_gap_s=FOR_EVER_S)
    for token in range(3):
        outbox.put([delta(token)])
    assert reader.tokens == [[0]]

    outbox.put([delta(3, is_first=True)])

    assert reader.tokens == [[0], [1, 2, 3]]


async def test_the_gap_ends_by_itself(reader: Reader) -> None:
    outbox = outbox_of(reader, min_gap_s=0.01)
    outbox.put([delta(0)])
    await asyncio.to_thread(outbox.put, [delta(1)])
    await asyncio.to_thread(outbox.put, [delta(2, reason=FinishReason.LENGTH)])

    await reader.wait_for_end()

    assert [token for tokens in reader.tokens for token in tokens] == [0, 1, 2]


async def test_a_load_that_is_news_waits_for_the_gap_only(reader: Reader) -> None:
    outbox = outbox_of(reader, min_gap_s=0.01)
    outbox.put([delta(0)])
    await asyncio.to_thread(outbox.put, ())
    await reader.wait_for(2)

    assert [len(item.deltas) for item in reader.messages] == [1, 0]
    assert reader.messages[1].load == LOAD


async def test_what_a_reader_has_not_taken_waits_and_goes_in_one_message(reader: Reader) -> None:
    outbox = outbox_of(reader)
    reader.is_behind = True
    for token in range(5):
        await asyncio.to_thread(outbox.put, [delta(token, is_first=token == 0)])
    outbox.report()
    assert reader.messages == []

    reader.take_all()
    await reader.wait_for(1)

    assert reader.tokens == [[0, 1, 2, 3, 4]]


async def test_a_closed_outbox_has_sent_everything_though_the_reader_is_behind(reader: Reader) -> None:
    outbox = outbox_of(reader)
    reader.is_behind = True
    outbox.put([delta(1, reason=FinishReason.LENGTH)])
    assert not await outbox.has_closed(timeout_s=0.0)

    outbox.close()

    assert reader.tokens == [[1]]
    assert await outbox.has_closed(timeout_s=FOR_EVER_S)


async def test_cache_changes_go_with_the_next_message_but_not_before_a_snapshot(reader: Reader) -> None:
    outbox = outbox_of(reader, mirrors_cache=True)
    assert outbox.wants_snapshot
    outbox.put_cache(CHANGES)
    outbox.put([delta(1)])
    outbox.tell_snapshot(SNAPSHOT)
    outbox.put_cache(CHANGES)
    outbox.put([delta(2)])

    assert [item.cache for item in reader.messages] == [(), (SNAPSHOT,), (CHANGES,)]
    assert not outbox.wants_snapshot


async def test_a_snapshot_for_a_reader_that_is_behind_is_made_anew(reader: Reader) -> None:
    outbox = outbox_of(reader, mirrors_cache=True)
    reader.is_behind = True
    outbox.tell_snapshot(SNAPSHOT)
    assert not outbox.wants_snapshot
    reader.take_all()

    assert outbox.wants_snapshot
    large = CacheChanges(first_sequence=0, next_sequence=9, stored=b"x" * (MAX_WAITING_BYTES + 1), is_snapshot=True)
    outbox.tell_snapshot(large)

    assert reader.messages[0].cache == (large,)
    assert not outbox.wants_snapshot


class Bench:
    """An engine that writes to one reader."""

    def __init__(self) -> None:
        core = chain_engine(scheduler=SchedulerConfig(max_num_seqs=16, enable_cache_events=True))
        core.runner = self.runner = PausableRunner(core.runner)
        self.engine = AsyncEngine(lambda: core, report_period_s=0.05)
        self.reader = Reader()
        self.writing: asyncio.Task[None] | None = None

    async def begin(self, *, mirrors_cache: bool = False) -> None:
        await self.engine.start()
        self.writing = asyncio.create_task(
            self.engine.write_outputs("router", self.reader, mirrors_cache=mirrors_cache)
        )
        await self.reader.wait_for(1)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.runner.let_go()
    await bench.engine.close()


async def test_an_engine_writes_all_tokens_and_the_end_while_its_event_loop_does_nothing(bench: Bench) -> None:
    await bench.begin()
    prompts = {"a": [5, 6, 7], "b": [9] * 20}
    requests = [greedy_request(name, prompt, max_tokens=9, client_id="router") for name, prompt in prompts.items()]

    assert await bench.engine.submit(requests) == [None, None]
    await bench.reader.wait_for_end()
    assert await bench.engine.drain(moves_out=False, timeout_s=60)
    assert bench.writing is not None
    await bench.writing

    deltas = [delta for message in bench.reader.messages for delta in message.deltas]
    for name, prompt in prompts.items():
        mine = [delta for delta in deltas if delta.request_id == name]
        assert [token for delta in mine for token in delta.token_ids] == expected_tokens(prompt, 9)
        assert [delta.finish_reason for delta in mine if delta.finish_reason] == [FinishReason.LENGTH]
    assert bench.reader.messages[-1].load.is_empty


async def test_a_router_that_leaves_aborts_its_requests(bench: Bench) -> None:
    await bench.begin()
    bench.runner.hold()
    await bench.engine.submit([greedy_request("a", range(8), max_tokens=200, client_id="router")])
    assert bench.writing is not None
    bench.writing.cancel()
    await asyncio.gather(bench.writing, return_exceptions=True)
    bench.runner.let_go()

    assert await bench.engine.drain(moves_out=False, timeout_s=60)


async def test_an_engine_that_dies_tells_its_routers_and_ends_their_streams(bench: Bench) -> None:
    await bench.begin()
    bench.runner.hold()
    await bench.engine.submit([greedy_request("a", range(8), max_tokens=200, client_id="router")])
    closing = asyncio.create_task(bench.engine.close())
    await asyncio.sleep(0)
    bench.runner.let_go()
    await closing
    assert bench.writing is not None
    await bench.writing

    (end,) = [delta for message in bench.reader.messages for delta in message.deltas if delta.finish_reason]
    assert end.finish_reason is FinishReason.ERROR
    assert end.error is not None
    assert end.error.code == "engine_dead"


async def test_a_router_that_mirrors_the_cache_gets_a_snapshot_reports_and_what_changes(bench: Bench) -> None:
    await bench.begin(mirrors_cache=True)
    await bench.reader.wait_for(2)
    bench.runner.hold()
    await bench.engine.submit([greedy_request("a", range(64), max_tokens=3, client_id="router")])
    num_messages = len(bench.reader.messages)
    await bench.reader.wait_for(num_messages + 2)  # reports come though the step takes its time
    bench.runner.let_go()
    await bench.reader.wait_for_end()
    bench.engine.resync_cache("router")
    num_messages = len(bench.reader.messages)
    await bench.reader.wait_for(num_messages + 2)

    changes = [item for message in bench.reader.messages for item in message.cache]
    stored = [bool(item.stored) for item in changes if not item.is_snapshot]
    assert changes[0].is_snapshot
    assert not changes[0].stored
    assert any(stored)
    assert changes[-1].is_snapshot
    assert changes[-1].stored
