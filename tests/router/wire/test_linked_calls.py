"""Submissions over the connection that brings the tokens: accepted once or not at all, failing as a Ray call does."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial

import pytest

from engine.contract.call_frame import CALL_VERSION
from engine.contract.errors import EngineDeadError, RequestRefusedError
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from engine.frontend.call_answers import answer_call
from router.pool.workers import WorkerUnavailableError
from router.wire.frame_connection import FrameConnection
from router.wire.frame_link import FrameLink, open_link
from router.wire.frame_server import FrameOffer, FrameServer
from router.wire.linked_calls import LinkedCalls
from tests.support.router.router_rig import until

PATIENCE_S = 60.0


class Engine:
    """Notes what reaches it, and does as the test says."""

    def __init__(self) -> None:
        self.accepted: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.moved: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.failure: Exception | None = None

    async def submit(self, requests: Sequence[GenerateRequest]) -> list[RequestRefusedError | None]:
        """Take those whose prompts fit."""
        if self.failure is not None:
            raise self.failure
        self.accepted += [request for request in requests if len(request.prompt_token_ids) < 9]
        await self.may_answer.wait()
        refusal = RequestRefusedError("the prompt has 9 tokens", code="prompt_too_long")
        return [None if len(request.prompt_token_ids) < 9 else refusal for request in requests]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Take note."""
        self.aborted += request_ids

    async def move_out(self, request_ids: Sequence[str], *, only_waiting: bool = False) -> None:
        """Take note, or fail."""
        if self.failure is not None:
            raise self.failure
        self.moved += [f"{name} if it waits" if only_waiting else name for name in request_ids]


def request(name: str, *, num_tokens: int = 3, client_id: str = "router-1") -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=TokenIds.of(range(num_tokens)),
        sampling=SamplingParams(max_tokens=2),
        client_id=client_id,
    )


async def say_hello(connection: FrameConnection) -> None:
    connection.send(b"hello")
    await asyncio.Event().wait()


@pytest.fixture
async def engine() -> Engine:
    return Engine()


@pytest.fixture
async def link(engine: Engine) -> AsyncIterator[FrameLink]:
    server = FrameServer()
    await server.start()
    offer = server.offer(say_hello, partial(answer_call, engine))
    assert offer is not None
    link = await open_link(offer)
    assert link is not None
    await anext(link)
    yield link
    await link.aclose()
    await server.close()


@pytest.fixture
async def calls(link: FrameLink) -> LinkedCalls:
    return LinkedCalls("decode-0", "router-1", link)


def packed(calls: LinkedCalls, *requests: GenerateRequest) -> bytes:
    call = calls.packed(requests)
    assert call is not None
    return call


async def test_each_request_is_accepted_once_in_order_and_answered_for_itself(
    engine: Engine, calls: LinkedCalls
) -> None:
    requests = [request(f"r{number}", num_tokens=9 if number % 5 == 0 else 3) for number in range(100)]

    answers = await asyncio.gather(
        *(
            calls.submit(packed(calls, *requests[start : start + 2]), timeout_s=PATIENCE_S)
            for start in range(0, len(requests), 2)
        )
    )

    assert engine.accepted == [one for one in requests if len(one.prompt_token_ids) < 9]
    codes = [refusal.code if refusal is not None else None for answer in answers for refusal in answer]
    assert codes == ["prompt_too_long" if number % 5 == 0 else None for number in range(100)]


async def test_an_abort_follows_the_submission_before_it(engine: Engine, calls: LinkedCalls) -> None:
    engine.may_answer.clear()
    submitting = asyncio.ensure_future(calls.submit(packed(calls, request("a")), timeout_s=PATIENCE_S))
    await asyncio.sleep(0)

    await calls.abort(["a", "unknown"], timeout_s=PATIENCE_S)
    engine.may_answer.set()

    assert await submitting == [None]
    assert engine.aborted == ["a", "unknown"]


async def test_an_order_to_move_arrives_and_a_dead_engine_answers_it_too(engine: Engine, calls: LinkedCalls) -> None:
    await calls.move_out(["a", "unknown"], timeout_s=PATIENCE_S)
    await calls.move_out(["c"], timeout_s=PATIENCE_S, only_waiting=True)
    engine.failure = EngineDeadError("the engine is not running")

    with pytest.raises(WorkerUnavailableError, match="EngineDeadError: the engine is not running"):
        await calls.move_out(["b"], timeout_s=PATIENCE_S)
    assert engine.moved == ["a", "unknown", "c if it waits"]


async def test_a_dead_engine_makes_the_replica_unavailable(engine: Engine, calls: LinkedCalls) -> None:
    engine.failure = EngineDeadError("the engine is not running")

    with pytest.raises(WorkerUnavailableError, match="EngineDeadError: the engine is not running") as caught:
        await calls.submit(packed(calls, request("a")), timeout_s=PATIENCE_S)
    assert caught.value.replica_id == "decode-0"


async def test_a_worker_that_does_not_answer_is_unavailable(engine: Engine, calls: LinkedCalls) -> None:
    engine.may_answer.clear()

    with pytest.raises(WorkerUnavailableError, match=r"no answer to submit within 0\.05 s"):
        await calls.submit(packed(calls, request("a")), timeout_s=0.05)
    engine.may_answer.set()


async def test_a_broken_connection_makes_the_replica_unavailable_and_nothing_is_sent_twice(
    engine: Engine, link: FrameLink, calls: LinkedCalls
) -> None:
    engine.may_answer.clear()
    submitting = asyncio.ensure_future(calls.submit(packed(calls, request("a")), timeout_s=PATIENCE_S))
    await until(lambda: bool(engine.accepted))
    await link.aclose()
    engine.may_answer.set()

    with pytest.raises(WorkerUnavailableError, match="the connection ended"):
        await submitting
    with pytest.raises(WorkerUnavailableError, match="the connection to the worker has ended"):
        await calls.submit(packed(calls, request("b")), timeout_s=PATIENCE_S)
    assert engine.accepted == [request("a")]


async def test_a_call_of_another_version_fails_by_name(link: FrameLink, calls: LinkedCalls) -> None:
    call = packed(calls, request("a"))

    with pytest.raises(WorkerUnavailableError, match=f"has version 9, but this process reads version {CALL_VERSION}"):
        await calls.submit(bytes([9]) + call[1:], timeout_s=PATIENCE_S)


async def test_what_belongs_elsewhere_or_has_no_form_goes_by_ray(calls: LinkedCalls) -> None:
    large = replace(request("a"), sampling=SamplingParams(max_tokens=2, seed=1 << 70))

    assert calls.packed([request("a"), request("b", client_id="an earlier stream")]) is None
    assert calls.packed([large]) is None


DYING_WORKER = """
import asyncio, os, signal
from router.wire.frame_server import FrameServer

async def write(connection):
    connection.send(b"hello")
    await asyncio.Event().wait()

async def die(call):
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    server = FrameServer()
    await server.start()
    offer = server.offer(write, die)
    print(offer.name, offer.key.hex(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_worker_killed_between_submission_and_acceptance_is_unavailable_and_its_stream_ends() -> None:
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", DYING_WORKER, stdout=asyncio.subprocess.PIPE)
    assert worker.stdout is not None
    name, key = (await worker.stdout.readline()).split()
    link = await open_link(FrameOffer(name.decode(), bytes.fromhex(key.decode())))
    assert link is not None
    assert await anext(link) == b"hello"
    calls = LinkedCalls("decode-0", "router-1", link)

    with pytest.raises(WorkerUnavailableError, match="the connection ended before the worker answered"):
        await calls.submit(packed(calls, request("a")), timeout_s=PATIENCE_S)

    assert [frame async for frame in link] == []
    assert await worker.wait() == -signal.SIGKILL
