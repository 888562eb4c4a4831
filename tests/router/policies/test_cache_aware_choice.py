"""Routers that know what real engines have cached, are asked for sessions, and balance engines of different size."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.contract.executor import StepRunner
from engine.contract.messages import SamplingParams
from engine.contract.token_ids import TokenIds
from router.request.text_request import TextRequest
from router.service import RouterService
from router.settings import RouterSettings
from tests.support.engine.chain_runner import expected_tokens
from tests.support.engine.engine_pools import BLOCK_SIZE, EnginePool, engine_pools
from tests.support.engine.loop_paced_runner import LoopPacedRunner
from tests.support.router.router_rig import FAST, until

PREFIX = dataclasses.replace(FAST, prefill_policy="prefix", decode_policy="prefix", report_period_s=0.5)
LONG = list(range(100, 164))
NUM_CLIENTS = 100
NUM_REQUESTS = 300
OTHER = list(range(500, 564))


@dataclass
class Bench:
    """Several routers over the same real engines."""

    prefill: EnginePool
    decode: EnginePool
    routers: list[RouterService]
    num_sent: int = 0

    async def complete(
        self,
        prompt: Sequence[int],
        *,
        router: int = 0,
        num_tokens: int = 4,
        salt: str | None = None,
        session: str | None = None,
    ) -> list[int]:
        """All tokens of one answer."""
        self.num_sent += 1
        request = TextRequest(
            request_id=f"r{self.num_sent}",
            prompt_token_ids=TokenIds.of(prompt),
            sampling=SamplingParams(max_tokens=num_tokens, ignore_eos=True),
            cache_salt=salt,
            session_id=session,
        )
        output = self.routers[router].generate(request)
        tokens: list[int] = []
        while pieces := await output.take():
            tokens.extend(token for piece in pieces for token in piece.token_ids)
        assert tokens == expected_tokens(list(prompt), num_tokens)
        return tokens

    def hits(self, role: str) -> dict[str, int]:
        """Prompt tokens that each engine of a role found in its cache."""
        engines = self.prefill.engines if role == "prefill" else self.decode.engines
        return {name: int(engine.load.counters["prefix_hit_tokens"]) for name, engine in engines.items()}

    def num_requests(self, role: str) -> dict[str, int]:
        """Requests that each engine of a role was given."""
        engines = self.prefill.engines if role == "prefill" else self.decode.engines
        return {name: int(engine.load.counters["num_requests"]) for name, engine in engines.items()}

    def num_mirrored(self, router: int, role: str) -> int:
        """Blocks that a router knows of."""
        service = self.routers[router]
        mirror = (service.prefill_pool if role == "prefill" else service.decode_pool).mirror
        assert mirror is not None
        return mirror.num_blocks


@asynccontextmanager
async def bench_of(
    model_dir: Path,
    *,
    num_routers: int = 1,
    num_prefill: int = 1,
    settings: RouterSettings = PREFIX,
    decode_blocks: Sequence[int] = (256,),
    max_num_seqs: int = 16,
    wrap_decode_runner: Callable[[StepRunner], StepRunner] = lambda runner: runner,
) -> AsyncIterator[Bench]:
    async with engine_pools(
        num_prefill=num_prefill,
        decode_blocks=decode_blocks,
        max_num_seqs=max_num_seqs,
        wrap_decode_runner=wrap_decode_runner,
    ) as (prefill, decode):
        routers = [
            RouterService(model_dir, "tiny", {"prefill": prefill, "decode": decode}, settings)
            for _ in range(num_routers)
        ]
        for router in routers:
            await router.start()
        try:
            yield Bench(prefill, decode, routers)
        finally:
            for router in routers:
                await router.close()


async def test_prompt_goes_where_its_prefix_is_cached(model_dir: Path) -> None:
    async with bench_of(model_dir, num_prefill=3, decode_blocks=[256] * 3) as bench:
        for prompt in (LONG, OTHER, LONG, OTHER, LONG):
            await bench.complete(prompt)

        # All but the last block of each prompt, which a hit leaves to be computed: its end gives the next token.
        assert sum(bench.hits("prefill").values()) == 3 * (len(LONG) - BLOCK_SIZE)


async def test_salted_prompt_finds_nothing_of_another_salt_and_all_of_its_own(model_dir: Path) -> None:
    async with bench_of(model_dir, num_prefill=2, decode_blocks=[256] * 2) as bench:
        await bench.complete(LONG, salt="mine")
        await bench.complete(LONG)
        assert sum(bench.hits("prefill").values()) == 0

        await bench.complete(LONG, salt="mine")
        assert sum(bench.hits("prefill").values()) == len(LONG) - BLOCK_SIZE


async def test_second_router_learns_what_the_first_one_filled(model_dir: Path) -> None:
    async with bench_of(model_dir, num_routers=2, num_prefill=3) as bench:
        await bench.complete(LONG, router=0)
        await until(lambda: bench.num_mirrored(1, "prefill") == bench.num_mirrored(0, "prefill") > 0)
        await bench.complete(LONG, router=1)

        assert sum(bench.hits("prefill").values()) == len(LONG) - BLOCK_SIZE


async def test_router_that_starts_late_gets_a_snapshot(model_dir: Path) -> None:
    async with bench_of(model_dir, num_prefill=2) as bench:
        await bench.complete(LONG)
        late = RouterService(model_dir, "tiny", {"prefill": bench.prefill, "decode": bench.decode}, PREFIX)
        await late.start()
        bench.routers.append(late)
        await until(lambda: bench.num_mirrored(1, "prefill") == len(LONG) // BLOCK_SIZE)


async def test_router_that_missed_news_asks_for_everything_again(model_dir: Path) -> None:
    async with bench_of(model_dir) as bench:
        await bench.complete(LONG)
        pool = bench.routers[0].prefill_pool
        pool.forget_cache("prefill-0")

        await bench.complete(OTHER)

        num_blocks = (len(LONG) + len(OTHER)) // BLOCK_SIZE
        await until(lambda: bench.num_mirrored(0, "prefill") == num_blocks)


async def test_remainder_that_is_short_is_computed_on_decode(model_dir: Path) -> None:
    settings = dataclasses.replace(FAST, local_prefill_tokens=12, report_period_s=0.5)
    async with bench_of(model_dir, settings=settings) as bench:
        first = await bench.complete(LONG, num_tokens=9)
        follow_up = [*LONG, *first, 7, 8, 9]
        await bench.complete(follow_up)
        assert bench.num_requests("prefill") == {"prefill-0": 1}, "the turn before is cached on decode"

        await bench.complete([*follow_up, *range(30)])
        assert bench.num_requests("prefill") == {"prefill-0": 2}, "30 new tokens are too many"


async def test_sessions_stay_at_their_workers_at_every_router(model_dir: Path) -> None:
    settings = dataclasses.replace(FAST, report_period_s=0.5)
    async with bench_of(model_dir, num_routers=2, num_prefill=4, settings=settings) as bench:
        for number in range(6):
            await bench.complete([*LONG, number], router=number % 2, session="alice")

        assert sorted(bench.num_requests("prefill").values()) == [0, 0, 0, 6]


async def test_session_of_a_failed_worker_moves_and_comes_back(model_dir: Path) -> None:
    settings = dataclasses.replace(FAST, report_period_s=0.5, backoff_min_s=0.01)
    async with bench_of(model_dir, num_prefill=2, settings=settings) as bench:
        await bench.complete(LONG, session="alice")
        home = next(name for name, count in bench.num_requests("prefill").items() if count)
        pool = bench.routers[0].prefill_pool
        pool.note_failure(home, "test")
        await bench.complete(LONG, session="alice")
        assert bench.num_requests("prefill")[home] == 1

        await until(lambda: all(replica.is_in_service for replica in pool.replicas))
        await bench.complete(LONG, session="alice")
        assert bench.num_requests("prefill")[home] == 2


async def test_decode_workers_of_different_size_fill_up_evenly(model_dir: Path) -> None:
    """Requests dealt out by number would fill the small one three times as much."""
    settings = dataclasses.replace(FAST, report_period_s=0.5)
    async with bench_of(
        model_dir,
        num_prefill=2,
        decode_blocks=[1200, 3600],
        max_num_seqs=128,
        settings=settings,
        wrap_decode_runner=lambda runner: LoopPacedRunner(runner, num_turns=2),  # both make about as many steps
    ) as bench:
        source = random.Random(3)
        work = [(7 * number, source.randrange(16, 33), source.randrange(60, 200)) for number in range(NUM_REQUESTS)]
        usages: list[list[float]] = []

        async def client() -> None:
            while work:
                start, num_prompt_tokens, num_tokens = work.pop()
                await bench.complete(range(start, start + num_prompt_tokens), num_tokens=num_tokens)
                # Each answer is a sample, from when the load has built up until it ends: a busy machine takes no fewer.
                if work and len(work) < NUM_REQUESTS - 1.5 * NUM_CLIENTS:
                    usages.append([engine.load.kv_usage for engine in bench.decode.engines.values()])

        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))

        small, large = (statistics.fmean(of_engine) for of_engine in zip(*usages, strict=True))
        assert min(small, large) > 0.2, "there was load"
        assert 1 / 1.6 < small / large < 1.6
