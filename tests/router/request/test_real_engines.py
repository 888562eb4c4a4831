"""The router over real prefill and decode engines: the same tokens under load, deaths and departures; nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from engine.contract.messages import CacheReset
from router.administration import ResetAnswer
from router.pool.pool import ReplicaPool
from router.service import RouterService
from router.settings import RouterSettings
from tests.support.engine.chain_runner import expected_tokens
from tests.support.router.live_router import NUM_TOKENS, Live, live_router, token_ids
from tests.support.router.router_rig import FAST, until


@asynccontextmanager
async def other_router(model_dir: Path, live: Live, *, settings: RouterSettings) -> AsyncIterator[RouterService]:
    """A second router over the same engines."""
    service = RouterService(model_dir, "tiny", {"prefill": live.prefill, "decode": live.decode}, settings)
    await service.start()
    try:
        yield service
    finally:
        await service.close()


def dropped_by(answers: Sequence[ResetAnswer]) -> list[CacheReset]:
    """What the workers dropped; all of them must have."""
    dropped = [answer.dropped for answer in answers if answer.dropped is not None]
    assert len(dropped) == len(answers)
    return dropped


def pools_of(service: RouterService) -> tuple[ReplicaPool, ReplicaPool]:
    """Both pools as a router knows them."""
    return service.prefill_pool, service.decode_pool


def prompts(count: int) -> list[list[int]]:
    source = random.Random(7)
    shared = [source.randrange(1000) for _ in range(20)]
    return [
        shared[: source.randrange(20)] + [source.randrange(1000) for _ in range(source.randrange(1, 60))]
        for _ in range(count)
    ]


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (2, 2)])
async def test_many_at_once_get_the_tokens_of_one_alone(model_dir: Path, num_prefill: int, num_decode: int) -> None:
    async with live_router(model_dir, num_prefill=num_prefill, num_decode=num_decode) as live:
        asked = prompts(48)
        answers = await asyncio.gather(*(live.complete(prompt) for prompt in asked))

        assert [token_ids(answer) for answer in answers] == [expected_tokens(prompt, NUM_TOKENS) for prompt in asked]
        await until(live.is_at_rest)
        totals = (await live.client.get("/status")).json()["totals"]
        assert totals["transfers"] > 0
        assert (totals["requests"], totals["finished"], totals["tokens"]) == (48, 48, 48 * NUM_TOKENS)


@pytest.mark.parametrize("is_one_router", [True, False], ids=("one router", "another router"))
async def test_reset_with_preemption_changes_no_token_and_leaves_nothing_cached(
    model_dir: Path, is_one_router: bool
) -> None:
    asked = [[*range(100, 140), index] for index in range(4)]
    settings = dataclasses.replace(FAST, decode_policy="prefix")
    async with (
        live_router(model_dir, num_prefill=2, num_decode=2, settings=settings, turns_per_step=1000) as live,
        other_router(model_dir, live, settings=settings) as other,
    ):
        orders = live.service.administration if is_one_router else other.administration
        answers = asyncio.gather(*(live.complete(prompt, max_tokens=150) for prompt in asked))
        await until(lambda: sum(load.counters["num_generated_tokens"] for load in live.loads()) > 3 * len(asked))
        preempted = dropped_by(await orders.reset_prefix_cache(preempt_running=True))
        assert len(preempted) == 4
        assert sum(item.num_preempted for item in preempted) > 0
        assert [token_ids(answer) for answer in await answers] == [expected_tokens(prompt, 150) for prompt in asked]
        await until(live.is_at_rest)
        assert sum(item.num_blocks for item in dropped_by(await orders.reset_prefix_cache(preempt_running=False))) > 0
        mirrors = [pool.mirror for service in (live.service, other) for pool in pools_of(service)]
        await until(lambda: not any(mirror.num_blocks for mirror in mirrors if mirror is not None))

        again = await live.complete(asked[0])
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        await until(lambda: any(mirror is not None and mirror.num_blocks for mirror in mirrors))


async def test_little_memory_makes_requests_wait_and_not_fail(model_dir: Path) -> None:
    async with live_router(model_dir, num_blocks=40) as live:
        asked = prompts(24)
        answers = await asyncio.gather(*(live.complete(prompt) for prompt in asked))

        assert [token_ids(answer) for answer in answers] == [expected_tokens(prompt, NUM_TOKENS) for prompt in asked]
        await until(live.is_at_rest)


@pytest.mark.known_failure(37)
async def test_choices_are_all_served_or_refused_as_one_body_before_they_begin(model_dir: Path) -> None:
    """With long answers at the same time, little memory and few places to wait, some of these bodies used to be cut
    off.
    """
    source = random.Random(11)
    settings = dataclasses.replace(FAST, max_num_queued=5)
    async with live_router(model_dir, num_blocks=40, settings=settings) as live:

        async def ask(prompt: list[int], num_choices: int) -> str:
            async with live.client.stream(
                "POST",
                "/v1/completions",
                json={"prompt": prompt, "n": num_choices, "max_tokens": 40, "ignore_eos": True, "stream": True},
            ) as response:
                text = (await response.aread()).decode()
            if response.status_code != 200:
                return f"{response.status_code} {json.loads(text)['error']['code']}"
            assert text.endswith("data: [DONE]\n\n")
            return text if '"error"' in text else "served"

        outcomes: Counter[str] = Counter()
        for _ in range(11):
            bodies = [(prompt, source.randrange(1, 6)) for prompt in prompts(10)]
            outcomes.update(await asyncio.gather(*(ask(*body) for body in bodies)))

        assert set(outcomes) == {"served", "429 queue_full"}, outcomes
        await until(live.is_at_rest)


async def test_decode_engine_that_ends_mid_stream_loses_no_token(model_dir: Path) -> None:
    async with live_router(model_dir, num_decode=2, turns_per_step=200) as live:
        asked = prompts(24)
        answers = [asyncio.create_task(live.complete(prompt, max_tokens=45)) for prompt in asked]
        victim = live.decode.engines["decode-0"]
        await until(lambda: victim.load.counters["num_generated_tokens"] > 40)
        await victim.close()

        for prompt, answer in zip(asked, answers, strict=True):
            assert token_ids(await answer) == expected_tokens(prompt, 45)
        assert live.service.counters.num_migrations > 0


async def test_drained_decode_engine_lets_its_requests_go_with_their_kv(model_dir: Path) -> None:
    async with live_router(model_dir, num_decode=2, turns_per_step=200) as live:
        asked = prompts(24)
        answers = [asyncio.create_task(live.complete(prompt, max_tokens=45)) for prompt in asked]
        leaving = live.decode.engines["decode-0"]
        await until(lambda: leaving.load.counters["num_generated_tokens"] > 40)
        assert await leaving.drain(moves_out=True, timeout_s=60)

        assert leaving.load.is_empty
        for prompt, answer in zip(asked, answers, strict=True):
            assert token_ids(await answer) == expected_tokens(prompt, 45)
        totals = (await live.client.get("/status")).json()["totals"]
        assert totals["drain_moves"] > 0
        assert (totals["migrations"], totals["recomputed_tokens"], totals["failed"]) == (0, 0, 0)
        await until(live.is_at_rest)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_rolling_drain_of_all_workers_of_a_role_loses_nothing(model_dir: Path, role: str) -> None:
    async with live_router(model_dir, num_prefill=2, num_decode=2, settings=FAST) as live:
        asked = prompts(32)
        answers = [asyncio.create_task(live.complete(prompt, max_tokens=45)) for prompt in asked]
        await until(lambda: live.service.counters.num_generated_tokens + live.service.num_alive > 20)
        pool = live.prefill if role == "prefill" else live.decode
        assert await pool.engines[f"{role}-0"].drain(moves_out=role == "decode", timeout_s=60)

        for prompt, answer in zip(asked, answers, strict=True):
            assert token_ids(await answer) == expected_tokens(prompt, 45)
        again = await live.complete(asked[0])
        assert token_ids(again) == expected_tokens(asked[0], NUM_TOKENS)
        await until(live.is_at_rest)


async def test_drained_prefill_engine_finishes_what_it_has_and_takes_nothing_more(model_dir: Path) -> None:
    async with live_router(model_dir, num_prefill=2) as live:
        leaving = live.prefill.engines["prefill-0"]
        draining = asyncio.create_task(leaving.drain(moves_out=False, timeout_s=60))
        await until(lambda: leaving.load.is_draining)
        asked = prompts(8)
        answers = await asyncio.gather(*(live.complete(prompt) for prompt in asked))

        assert await draining
        assert [token_ids(answer) for answer in answers] == [expected_tokens(prompt, NUM_TOKENS) for prompt in asked]
        assert leaving.load.counters["num_requests"] == 0


async def test_prefill_engine_that_ends_is_replaced(model_dir: Path) -> None:
    async with live_router(model_dir, num_prefill=2) as live:
        asked = prompts(24)
        answers = [asyncio.create_task(live.complete(prompt)) for prompt in asked]
        await until(lambda: live.service.counters.num_requests > 4)
        await live.prefill.engines["prefill-0"].close()

        for prompt, answer in zip(asked, answers, strict=True):
            assert token_ids(await answer) == expected_tokens(prompt, NUM_TOKENS)


async def test_clients_that_leave_at_random_moments_leave_nothing_on_any_engine(model_dir: Path) -> None:
    source = random.Random(3)

    async def visit(live: Live, prompt: list[int]) -> None:
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(source.random() * 0.4):
                await live.complete(prompt, max_tokens=45, stream=source.random() < 0.7)

    async with live_router(model_dir, num_prefill=2, num_decode=2) as live:
        num_rounds = 0
        while num_rounds < 3 or not live.service.counters.num_cancelled:  # on a busy machine few come as far
            await asyncio.gather(*(visit(live, prompt) for prompt in prompts(30)))
            num_rounds += 1
        await until(live.is_at_rest)
