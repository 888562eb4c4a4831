"""Requests that come while a step computes: their KV is loaded meanwhile, and they begin with the next step."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from engine.contract.config import (
    CacheConfig,
    EngineConfig,
    ModelCode,
    ModelConfigSource,
    ModelImplName,
    SchedulerConfig,
)
from engine.contract.errors import PromptTooLongError
from engine.contract.messages import FinishReason, GenerateRequest
from engine.frontend.async_engine import AsyncEngine
from engine.frontend.engine_core import EngineCore
from engine.frontend.offline import generate, run_requests
from kv_transfer.inproc import InProcessFabric
from tests.support.engine.chain_engine import chain_engine
from tests.support.engine.chain_runner import expected_tokens
from tests.support.engine.disaggregated import inproc_builder, inproc_pair
from tests.support.engine.engine_pools import INPROC
from tests.support.engine.layered_runner import TIMEOUT_S, LayeredRunner
from tests.support.engine.local_client import run_to_end
from tests.support.engine.requests import greedy_request
from tests.support.router.router_rig import until

PROMPT = list(range(3, 40))


class HeldEngine:
    """A decode engine inside a step, and a peer that hands prompts over to it."""

    def __init__(self) -> None:
        fabric = InProcessFabric()
        self.peer = chain_engine(build_connector=inproc_builder(fabric, "prefill", INPROC))
        self.core = chain_engine(build_connector=inproc_builder(fabric, "decode", INPROC))
        self.core.runner = self.runner = LayeredRunner(self.core.runner, self.core.between_layers)
        self.engine = AsyncEngine(lambda: self.core)

    def hand_over(self, request_id: str) -> GenerateRequest:
        """A request whose prompt the peer has computed."""
        request = greedy_request(request_id, PROMPT, max_tokens=6)
        self.peer.add_request(dataclasses.replace(request, hand_over=True))
        (last,) = [delta for delta in self.peer.step().deltas() if delta.finish_reason is FinishReason.HANDED_OVER]
        return dataclasses.replace(request, output_token_ids=last.token_ids, kv_transfer=last.kv_transfer)

    async def num_loaded(self, count: int) -> None:
        """Return when so many loads have ended."""
        async with asyncio.timeout(TIMEOUT_S):
            while self.core.stats().transfer.num_transfers < count:
                await asyncio.to_thread(self.runner.pass_layers, 1)

    async def pass_layers(self, count: int = 3) -> None:
        """Return when so many more layers of the step have begun."""
        await asyncio.to_thread(self.runner.pass_layers, count)


@pytest.fixture
async def held() -> AsyncIterator[HeldEngine]:
    held = HeldEngine()
    await held.engine.start()
    held.runner.hold()
    busy = asyncio.create_task(run_to_end(held.engine, greedy_request("busy", [5, 6, 7], max_tokens=9)))
    await held.pass_layers()
    yield held
    held.runner.let_go()
    assert list((await busy).token_ids) == expected_tokens([5, 6, 7], 9)
    await held.engine.close()
    held.peer.close()


async def test_kv_is_loaded_while_the_step_computes_and_its_request_is_in_the_next_one(held: HeldEngine) -> None:
    request = held.hand_over("moved")

    moved = asyncio.create_task(run_to_end(held.engine, request))
    await held.num_loaded(1)
    assert held.runner.num_steps == 0, "the step still computes"

    held.runner.let_go()
    assert list((await moved).token_ids) == expected_tokens(PROMPT, 6)[1:]
    assert held.runner.began_in == {"busy": 1, "moved": 2}
    assert held.core.stats().scheduler.recomputed_tokens == 0


async def test_a_request_to_compute_here_waits_for_the_end_of_the_step(held: HeldEngine) -> None:
    other = asyncio.create_task(run_to_end(held.engine, greedy_request("other", PROMPT, max_tokens=4)))
    await held.pass_layers()

    held.runner.let_go()
    assert list((await other).token_ids) == expected_tokens(PROMPT, 4)
    assert held.runner.began_in == {"busy": 1, "other": 2}


async def test_refusals_do_not_wait_for_the_end_of_the_step(held: HeldEngine) -> None:
    (answer,) = await asyncio.wait_for(
        held.engine.submit([greedy_request("long", [1] * 500, max_tokens=4)]), timeout=TIMEOUT_S
    )

    assert isinstance(answer, PromptTooLongError)
    assert held.runner.num_steps == 0


async def test_arrivals_stay_behind_a_command_that_waits_for_the_end_of_the_step(held: HeldEngine) -> None:
    """Otherwise the abort of an earlier run of a request would end the run that came after it."""
    held.engine.abort_nowait(["moved"])
    moved = asyncio.create_task(run_to_end(held.engine, held.hand_over("moved")))
    await until(lambda: len(held.engine._thread._commands) == 2)
    await held.pass_layers()
    assert len(held.engine._thread._commands) == 2
    assert held.core.stats().transfer.num_transfers == 0

    held.runner.let_go()
    assert list((await moved).token_ids) == expected_tokens(PROMPT, 6)[1:]


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_tokens_of_a_model_are_the_same_when_kv_comes_within_a_step(
    impl: ModelImplName, checkpoint: Callable[[str], Path]
) -> None:
    config = EngineConfig(
        model=ModelConfigSource(path=checkpoint("llama"), device="cpu", code=ModelCode(impl=impl)),
        cache=CacheConfig(num_blocks=64, block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=4, max_model_len=128),
    )
    request = greedy_request("moved", PROMPT, max_tokens=6)
    busy = greedy_request("busy", [5, 6, 7], max_tokens=9)
    with inproc_pair(config) as (prefill, decode):
        expected = generate(prefill, [request, busy])
        prefill.add_request(dataclasses.replace(request, request_id="source", hand_over=True))
        (last,) = prefill.step().deltas()
        moved = dataclasses.replace(request, output_token_ids=last.token_ids, kv_transfer=last.kv_transfer)

        outputs = _generate_within_a_step(decode, busy, moved)

        assert outputs == {"moved": expected["moved"][1:], "busy": expected["busy"]}


def _generate_within_a_step(decode: EngineCore, busy: GenerateRequest, moved: GenerateRequest) -> dict[str, list[int]]:
    """The tokens of both requests; the second one comes between two layers of the first one's step."""
    num_layers = 0

    def arrive() -> None:
        nonlocal num_layers
        num_layers += 1
        if num_layers == 2:
            decode.add_request(moved)
            decode.begin_loads()
            assert decode.stats().scheduler.num_loading == 1

    decode.take_arrivals = arrive
    outputs: dict[str, list[int]] = {busy.request_id: [], moved.request_id: []}
    for delta in run_requests(decode, [busy]):
        outputs[delta.request_id].extend(delta.token_ids)
    return outputs
