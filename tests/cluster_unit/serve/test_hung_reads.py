"""A worker whose read hangs exits by itself, one worker of a pool at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.serve.hung_reads import END_MARGIN_S, HungReads
from engine.contract.errors import ReadHangsError
from engine.contract.messages import FinishReason, GenerateRequest, TokenDelta
from engine.frontend.async_engine import AsyncEngine
from kv_transfer.fault_options import Fault, FaultOptions, ScheduledFault
from kv_transfer.options import ConnectorOptions
from tests.support.clock import ManualClock
from tests.support.engine.chain_runner import expected_tokens
from tests.support.engine.engine_pools import engine_pools
from tests.support.engine.requests import greedy_request

PATIENCE_S = 60.0
WAIT_S = 60.0
NUM_TOKENS = 6
PROMPT = tuple(range(1, 20))


class Watched:
    """A worker with a manual clock, to which the test can report that a read hangs and that it may leave."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.hangs = False
        self.is_our_turn = True
        self.num_leaves = 0
        self.watch = HungReads(
            has_hung_read=lambda: self.hangs,
            may_leave=self._may_leave,
            leave=self._leave,
            patience_s=PATIENCE_S,
            clock=self.clock,
        )

    async def _may_leave(self) -> bool:
        return self.is_our_turn

    def _leave(self) -> None:
        self.num_leaves += 1


@pytest.fixture
def worker() -> Watched:
    return Watched()


async def test_worker_without_such_a_read_stays(worker: Watched) -> None:
    await worker.watch.look()

    assert worker.num_leaves == 0
    worker.watch.check_health()


async def test_worker_whose_read_hangs_leaves_at_once(worker: Watched) -> None:
    worker.hangs = True

    await worker.watch.look()

    assert worker.num_leaves == 1


async def test_worker_waits_for_its_turn_but_not_for_ever(worker: Watched) -> None:
    worker.hangs, worker.is_our_turn = True, False
    await worker.watch.look()
    worker.clock.advance(PATIENCE_S - 1)
    await worker.watch.look()
    assert worker.num_leaves == 0

    worker.clock.advance(1)
    await worker.watch.look()

    assert worker.num_leaves == 1


async def test_read_that_ends_while_the_worker_waits_lets_it_stay(worker: Watched) -> None:
    worker.hangs, worker.is_our_turn = True, False
    await worker.watch.look()
    worker.hangs = False
    worker.clock.advance(3 * PATIENCE_S)
    await worker.watch.look()

    worker.watch.check_health()
    assert worker.num_leaves == 0


async def test_worker_that_does_not_end_fails_its_health_check(worker: Watched) -> None:
    worker.hangs = True
    await worker.watch.look()
    worker.clock.advance(2 * PATIENCE_S + END_MARGIN_S)
    worker.watch.check_health()

    worker.clock.advance(1)

    with pytest.raises(ReadHangsError, match="read hangs: a read of KV goes on 136 s after it was given up"):
        worker.watch.check_health()


@pytest.mark.known_failure(4, 5)
async def test_hung_read_of_real_engines_is_told_and_its_worker_drained_with_every_request_answered() -> None:
    """The first read of the decode engine never ends, and the fault is healed then."""
    faults = FaultOptions(schedule=(ScheduledFault(fault=Fault.READ_HANGS, nth=1),))
    options = ConnectorOptions(
        connector="inproc",
        streamed=False,
        load_timeout_s=0.5,
        hung_read_timeout_s=0.5,
        lease_ttl_s=2.0,
        allow_faults=True,
        faults=faults,
    )
    async with engine_pools(options=options) as (prefill, decode):
        (source,), (reader,) = prefill.engines.values(), decode.engines.values()
        assert await _answer(source, reader, "hangs") == expected_tokens(PROMPT, NUM_TOKENS)
        await _until(lambda: reader.load.has_hung_read)
        held = reader.load
        assert (held.unhealthy, held.num_held_blocks > 0) == ("read hangs", True)

        drained: list[asyncio.Task[bool]] = []

        def leave() -> None:
            if not drained:
                drained.append(asyncio.create_task(reader.drain(moves_out=False, timeout_s=WAIT_S)))

        watch = HungReads(
            has_hung_read=lambda: reader.has_hung_read, may_leave=_always, leave=leave, patience_s=PATIENCE_S
        )
        await watch.look()

        assert await drained[0], "requests are gone, though the read goes on"
        assert reader.load.is_empty
        await reader.close()
        await _until(lambda: source.load.num_free_blocks == source.load.num_blocks)


async def _always() -> bool:
    return True


async def _until(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


async def _answer(prefill: AsyncEngine, decode: AsyncEngine, request_id: str) -> list[int]:
    """The tokens of one request that is handed over."""
    request = greedy_request(request_id, PROMPT, max_tokens=NUM_TOKENS, client_id="router")
    tokens, last = await _run(prefill, replace(request, hand_over=True))
    assert last.finish_reason is FinishReason.HANDED_OVER
    more, last = await _run(decode, replace(request, output_token_ids=tuple(tokens), kv_transfer=last.kv_transfer))
    assert last.finish_reason is FinishReason.LENGTH
    return tokens + more


async def _run(engine: AsyncEngine, request: GenerateRequest) -> tuple[list[int], TokenDelta]:
    """The request's tokens and its last delta."""
    tokens: list[int] = []
    messages = engine.outputs(request.client_id)
    await anext(messages)
    assert await engine.submit([request]) == [None]
    async for message in messages:
        for delta in message.deltas:
            tokens.extend(delta.token_ids)
            if delta.finish_reason is not None:
                await messages.aclose()  # type: ignore[attr-defined]  # the engine's iterator is a generator
                return tokens, delta
    raise AssertionError("the stream ended before the request")
