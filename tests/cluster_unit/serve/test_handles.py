"""The router's pools over callers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from cluster.serve.handles import RayWorkerPool, ServeTargets
from cluster.serve.refusal import Refusal
from engine.contract.call_frame import Answer, Submit, pack_answer, unpack_call
from engine.contract.messages import (
    CacheReset,
    GenerateRequest,
    LoadReport,
    RequestError,
    SamplingParams,
    StepMessage,
    WorkerInfo,
)
from engine.contract.step_frame import FRAME_VERSION, pack_step
from engine.contract.token_ids import TokenIds
from kv_transfer.fault_options import FaultOptions
from router.pool.workers import WorkerUnavailableError
from router.settings import RouterSettings
from router.wire.frame_connection import FrameConnection
from router.wire.frame_server import FrameOffer, FrameServer
from tests.support.router.fake_caller import FakeCaller

REQUEST = GenerateRequest(request_id="r", prompt_token_ids=TokenIds.of((1, 2)), sampling=SamplingParams(max_tokens=1))
LOAD = LoadReport(num_blocks=8, num_free_blocks=6)
PATIENCE = RouterSettings(submit_timeout_s=77.0, abort_timeout_s=55.0)
REFUSAL = Refusal(code="prompt_too_long", message="the prompt has 9 tokens")


async def test_status_is_made_of_the_workers_answer() -> None:
    info = WorkerInfo(
        role="decode",
        engine_id="a",
        incarnation="1",
        node_ip="10.0.0.7",
        pid=42,
        model_name="m",
        block_size=16,
        num_blocks=8,
        block_bytes=1024,
        max_model_len=64,
        vocab_size=100,
        device="cpu",
        dtype="float32",
    )

    async def status() -> tuple[WorkerInfo, LoadReport]:
        return info, LOAD

    answer = await RayWorkerPool(FakeCaller({"a": {"status": status}}), PATIENCE).status("a", timeout_s=1)

    assert (answer.replica_id, answer.node_ip, answer.pid, answer.info, answer.load) == (
        "a",
        "10.0.0.7",
        42,
        info,
        LOAD,
    )


async def test_reset_passes_the_answer_on() -> None:
    async def reset(preempt_running: bool) -> CacheReset | None:
        return CacheReset(num_blocks=3) if preempt_running else None

    pool = RayWorkerPool(FakeCaller({"a": {"reset_prefix_cache": reset}}), PATIENCE)

    assert await pool.reset_prefix_cache("a", preempt_running=True) == CacheReset(num_blocks=3)
    assert await pool.reset_prefix_cache("a", preempt_running=False) is None


async def test_submit_answers_each_request_in_order() -> None:
    async def submit(requests: Sequence[GenerateRequest]) -> list[Refusal | None]:
        return [None, REFUSAL][: len(requests)]

    answers = await RayWorkerPool(FakeCaller({"a": {"submit": submit}}), PATIENCE).submit("a", [REQUEST, REQUEST])

    assert answers[0] is None
    assert answers[1] is not None
    assert answers[1].code == "prompt_too_long"


async def no_offer(client_id: str, mirrors_cache: bool) -> FrameOffer | None:
    return None


async def test_outputs_are_the_stream_of_that_client() -> None:
    message = StepMessage(deltas=(), load=LOAD)

    async def outputs(client_id: str, mirrors_cache: bool) -> list[bytes]:
        return [pack_step(message)] if client_id == "router-1" else []

    pool = RayWorkerPool(FakeCaller({"a": {"outputs": outputs, "offer_outputs": no_offer}}), PATIENCE)

    assert [received async for received in pool.outputs("a", "router-1")] == [message]


async def refuse(call: bytes) -> bytes:
    refusal = RequestError(code=REFUSAL.code, message=REFUSAL.message)
    submitted = unpack_call(call)
    return pack_answer(Answer(refusals=(refusal,) * len(submitted.requests) if isinstance(submitted, Submit) else ()))


async def test_requests_aborts_and_moves_go_over_the_connection_while_there_is_one_and_else_by_ray() -> None:
    server = FrameServer()
    await server.start()
    by_ray: list[str] = []

    async def submit(requests: Sequence[GenerateRequest]) -> list[Refusal | None]:
        by_ray.extend(request.request_id for request in requests)
        return [None] * len(requests)

    async def abort(request_ids: Sequence[str]) -> None:
        by_ray.extend(request_ids)

    async def move_out(request_ids: Sequence[str], only_waiting: bool = False) -> None:
        by_ray.extend(f"move {name}{' if it waits' if only_waiting else ''}" for name in request_ids)

    async def write(connection: FrameConnection) -> None:
        connection.send(pack_step(StepMessage(deltas=(), load=LOAD)))
        await asyncio.Event().wait()

    async def offer_outputs(client_id: str, mirrors_cache: bool) -> FrameOffer | None:
        return server.offer(write, refuse)

    pool = RayWorkerPool(
        FakeCaller({"a": {"submit": submit, "abort": abort, "move_out": move_out, "offer_outputs": offer_outputs}}),
        PATIENCE,
    )
    mine = replace(REQUEST, request_id="mine", client_id="router-1")
    outputs = pool.outputs("a", "router-1")
    assert not pool.has_link("a")
    assert await pool.submit("a", [replace(mine, request_id="before")]) == [None]

    await anext(outputs)
    assert pool.has_link("a")
    (refusal,) = await pool.submit("a", [mine])
    await pool.abort("a", ["mine"])
    await pool.move_out("a", ["mine"])
    assert await pool.submit("a", [replace(mine, request_id="of another stream", client_id="router-0")]) == [None]

    await outputs.aclose()
    assert not pool.has_link("a")
    await pool.abort("a", ["after"])
    await pool.move_out("a", ["after"])
    await pool.move_out("a", ["a prompt"], only_waiting=True)
    assert refusal is not None
    assert refusal.code == REFUSAL.code
    assert by_ray == ["before", "of another stream", "after", "move after", "move a prompt if it waits"]
    await server.close()


async def test_outputs_of_a_worker_of_this_host_come_over_its_socket() -> None:
    message = StepMessage(deltas=(), load=LOAD)
    server = FrameServer()
    await server.start()

    async def write(connection: FrameConnection) -> None:
        connection.send(pack_step(message))

    async def offer_outputs(client_id: str, mirrors_cache: bool) -> FrameOffer | None:
        assert (client_id, mirrors_cache) == ("router-1", True)
        return server.offer(write, refuse)

    pool = RayWorkerPool(FakeCaller({"a": {"offer_outputs": offer_outputs}}), PATIENCE)

    assert [received async for received in pool.outputs("a", "router-1", mirrors_cache=True)] == [message]
    await server.close()


async def test_outputs_of_a_worker_whose_socket_is_out_of_reach_come_by_ray() -> None:
    message = StepMessage(deltas=(), load=LOAD)

    async def outputs(client_id: str, mirrors_cache: bool) -> list[bytes]:
        return [pack_step(message)]

    async def offer_outputs(client_id: str, mirrors_cache: bool) -> FrameOffer | None:
        return FrameOffer("baton-frames-of-another-host", b"0" * 16)

    pool = RayWorkerPool(FakeCaller({"a": {"outputs": outputs, "offer_outputs": offer_outputs}}), PATIENCE)

    assert [received async for received in pool.outputs("a", "router-1")] == [message]


async def test_worker_of_another_version_is_unavailable_and_the_reason_names_both() -> None:
    async def outputs(client_id: str, mirrors_cache: bool) -> list[bytes]:
        return [bytes([FRAME_VERSION + 1]) + pack_step(StepMessage(deltas=(), load=LOAD))[1:]]

    pool = RayWorkerPool(FakeCaller({"a": {"outputs": outputs, "offer_outputs": no_offer}}), PATIENCE)

    with pytest.raises(WorkerUnavailableError, match=rf"version {FRAME_VERSION + 1}.*version {FRAME_VERSION}") as error:
        await anext(aiter(pool.outputs("a", "router-1")))
    assert error.value.replica_id == "a"


class TimedCaller(FakeCaller):
    """Writes down how long each method may take."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts_s: dict[str, float] = {}

    async def call(self, replica_id: str, method: str, *args: object, timeout_s: float) -> Any:
        self.timeouts_s[method] = timeout_s
        return [] if method == "submit" else None


async def test_workers_have_the_time_that_the_settings_give_them() -> None:
    caller = TimedCaller()
    pool = RayWorkerPool(caller, PATIENCE)
    await pool.submit("a", [])
    await pool.abort("a", ["r"])
    await pool.drain("a")
    await pool.set_faults("a", FaultOptions())

    assert caller.timeouts_s == {"submit": 77.0, "abort": 55.0, "drain": 55.0, "set_faults": 55.0}


POOLS = ("prefill", "decode")


class Controller:
    """Serve's, as far as it is asked here: what it means to run, or that it cannot say."""

    def __init__(self, *answers: int | Exception) -> None:
        self._answers = iter(answers)

    @property
    def get_deployment_details(self) -> Controller:
        """The method, with what Ray adds to one."""
        return self

    async def remote(self, app: str, deployment: str) -> SimpleNamespace:
        """One answer."""
        assert app == "baton"
        assert deployment in POOLS
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(target_num_replicas=answer)


async def test_wanted_workers_are_those_that_serve_means_to_run() -> None:
    assert await ServeTargets(Controller(2, 5), POOLS).numbers(timeout_s=1) == {"prefill": 2, "decode": 5}


@pytest.mark.parametrize("error", [ActorDiedError(), KeyError("decode"), TimeoutError()])
async def test_wanted_workers_are_not_known_while_serve_cannot_say(error: Exception) -> None:
    assert await ServeTargets(Controller(2, error), POOLS).numbers(timeout_s=1) == {"prefill": 2}
