"""The streamed hand-over through the router and real engines: it changes no token, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.contract.executor import StepRunner
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from kv_transfer.options import ConnectorOptions
from router.request.generation import Generation
from router.service import RouterService
from tests.support.engine.chain_runner import VOCAB_SIZE, expected_tokens
from tests.support.engine.engine_pools import INPROC, EnginePool, engine_pools
from tests.support.engine.stepwise_runner import StepwiseRunner
from tests.support.router.router_rig import FAST, until

CHUNK_TOKENS = 16
BLOCKS_PER_CHUNK = CHUNK_TOKENS // 4
NUM_TOKENS = 8


@dataclass
class Rig:
    """A router over engines whose prefill computes chunk by chunk, when the test says so."""

    prefill: EnginePool
    decode: EnginePool
    service: RouterService
    runners: list[StepwiseRunner] = field(default_factory=list)

    def start(self, prompt: list[int], *, num_tokens: int = NUM_TOKENS) -> Generation:
        request = GenerateRequest(
            request_id=f"r-{random.getrandbits(64):x}",
            prompt_token_ids=TokenIds.of(prompt),
            sampling=SamplingParams(max_tokens=num_tokens, ignore_eos=True),
        )
        return self.service._orchestrator.start(request, timeout_s=60.0)

    def counter(self, name: str) -> float:
        return sum(engine.load.counters[name] for engine in self.decode.engines.values())

    def is_at_rest(self) -> bool:
        engines = [*self.prefill.engines.values(), *self.decode.engines.values()]
        loads = [engine.load for engine in engines]
        return self.service.num_alive == 0 and all(load.num_free_blocks == load.num_blocks for load in loads)

    async def wait_read_along(self, num_blocks: int) -> None:
        """Until decode read so many blocks of prompts that are not complete."""
        connectors = [engine._thread.core.connector for engine in self.decode.engines.values()]
        await until(lambda: sum(connector.stats().num_blocks for connector in connectors if connector) >= num_blocks)


@asynccontextmanager
async def rig(
    model_dir: Path,
    *,
    num_prefill: int = 1,
    is_open: bool = False,
    num_blocks: int = 256,
    options: ConnectorOptions = INPROC,
) -> AsyncIterator[Rig]:
    runners: list[StepwiseRunner] = []

    def wrap(runner: StepRunner) -> StepwiseRunner:
        runners.append(StepwiseRunner(runner))
        if is_open:
            runners[-1].open()
        return runners[-1]

    async with engine_pools(
        num_prefill=num_prefill,
        num_blocks=num_blocks,
        chunk_tokens=CHUNK_TOKENS,
        wrap_prefill_runner=wrap,
        options=options,
    ) as (prefill, decode):
        service = RouterService(model_dir, "tiny", {"prefill": prefill, "decode": decode}, FAST)
        await service.start()
        try:
            yield Rig(prefill, decode, service, runners)
        finally:
            for runner in runners:
                runner.open()
            await service.close()


def prompt_of(num_tokens: int, seed: int = 1) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


async def tokens_of(generation: Generation) -> list[int]:
    tokens: list[int] = []
    while deltas := await generation.take():
        tokens += [token for delta in deltas for token in delta.token_ids]
    return tokens


async def test_decode_reads_along_while_the_prompt_is_computed(model_dir: Path) -> None:
    async with rig(model_dir) as live:
        prompt = prompt_of(4 * CHUNK_TOKENS)
        generation = live.start(prompt)
        for number in range(1, 4):
            live.runners[0].allow(1)
            await live.wait_read_along(number * BLOCKS_PER_CHUNK)
        assert live.counter("num_generated_tokens") == 0
        live.runners[0].allow(1)

        assert await tokens_of(generation) == expected_tokens(prompt, NUM_TOKENS)
        await until(live.is_at_rest)
        assert live.counter("num_streamed_blocks") == 3 * BLOCKS_PER_CHUNK
        assert live.counter("num_blocks") == 4 * BLOCKS_PER_CHUNK
        assert live.counter("recomputed_tokens") == 0


async def test_prompt_of_one_chunk_is_handed_over_plainly(model_dir: Path) -> None:
    async with rig(model_dir, is_open=True) as live:
        prompt = prompt_of(CHUNK_TOKENS)

        assert await tokens_of(live.start(prompt)) == expected_tokens(prompt, NUM_TOKENS)
        assert (live.counter("num_streams"), live.counter("num_transfers")) == (0, 1)


@pytest.mark.known_failure(7)
@pytest.mark.parametrize("num_blocks", [256, 60])
async def test_many_at_once_get_the_tokens_of_one_alone(model_dir: Path, num_blocks: int) -> None:
    """With little memory early loads give way, and requests wait, and none fails."""
    async with rig(model_dir, is_open=True, num_blocks=num_blocks) as live:
        prompts = [prompt_of(random.Random(seed).randrange(4, 100), seed) for seed in range(60)]
        answers = await asyncio.gather(*(tokens_of(live.start(prompt)) for prompt in prompts))

        assert answers == [expected_tokens(prompt, NUM_TOKENS) for prompt in prompts]
        await until(live.is_at_rest)


async def test_client_that_leaves_during_prefill_frees_both_sides(model_dir: Path) -> None:
    async with rig(model_dir) as live:
        generation = live.start(prompt_of(4 * CHUNK_TOKENS))
        live.runners[0].allow(2)
        await live.wait_read_along(2 * BLOCKS_PER_CHUNK)

        generation.cancel()
        live.runners[0].open()

        await until(live.is_at_rest)
        assert live.counter("num_dropped_early_loads") == 1


async def test_router_that_goes_during_prefill_frees_both_sides(model_dir: Path) -> None:
    async with rig(model_dir) as live:
        live.start(prompt_of(4 * CHUNK_TOKENS))
        live.runners[0].allow(1)
        await live.wait_read_along(BLOCKS_PER_CHUNK)

        live.runners[0].open()
        await live.service.close()

        await until(live.is_at_rest)


async def test_stream_of_a_router_that_breaks_frees_what_was_held_for_it(model_dir: Path) -> None:
    """The router is gone and said nothing: the end of its stream says it."""
    async with rig(model_dir) as live:
        engine = live.decode.engines["decode-0"]
        generation = live.start(prompt_of(4 * CHUNK_TOKENS))
        live.runners[0].allow(1)
        await live.wait_read_along(BLOCKS_PER_CHUNK)
        (client_id,) = engine._streams

        await engine._thread.call(lambda core: core.forget_client(client_id))

        await until(lambda: engine.load.num_early_blocks == 0)
        live.runners[0].open()
        assert len(await tokens_of(generation)) == NUM_TOKENS
        await until(live.is_at_rest)


async def test_prefill_that_dies_is_replaced_and_what_was_read_from_it_is_not_used(model_dir: Path) -> None:
    async with rig(model_dir, num_prefill=2) as live:
        prompt = prompt_of(4 * CHUNK_TOKENS)
        generation = live.start(prompt)
        for runner in live.runners:
            runner.allow(2)
        await live.wait_read_along(2 * BLOCKS_PER_CHUNK)
        engines = live.prefill.engines
        (victim,) = [name for name, engine in engines.items() if engine.load.num_held_blocks]
        live.runners[list(engines).index(victim)].open()
        closing = asyncio.create_task(engines[victim].close())
        for runner in live.runners:
            runner.open()

        assert await tokens_of(generation) == expected_tokens(prompt, NUM_TOKENS)
        await closing


async def test_decode_that_does_not_stream_serves_all_the_same(model_dir: Path) -> None:
    async with rig(model_dir, is_open=True, options=ConnectorOptions(connector="inproc", streamed=False)) as live:
        prompt = prompt_of(4 * CHUNK_TOKENS)

        assert await tokens_of(live.start(prompt)) == expected_tokens(prompt, NUM_TOKENS)
        await until(live.is_at_rest)
        assert live.counter("num_streams") == 0
