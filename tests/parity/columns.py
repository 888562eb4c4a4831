"""The columns of the parity matrix: the ways that an answer can come about, and what can go wrong on them.

A column asks a row's question in a world of its own, and says for itself that its path was taken or its fault was
suffered: an answer that is right because nothing happened proves nothing. To add one, write such a function.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from kv_transfer.fault_options import Fault, FaultOptions, ScheduledFault
from tests.support.parity.answers import Answer
from tests.support.parity.feature import COMPLETION, Feature
from tests.support.parity.world import (
    PLAIN,
    RECOMPUTES,
    STREAMED,
    WITH_HOST_TIER,
    Setup,
    World,
    asking,
    suffering,
    world,
)
from tests.support.router.router_rig import until

Column = Callable[[Path, Feature], Awaitable[Answer]]
COLUMNS: dict[str, Column] = {}

LOCAL = replace(RECOMPUTES, local_prefill_tokens=1000)
"""Decode workers compute all prompts."""

CHUNK = 32
FEW_BLOCKS = 40
STEPS_BEFORE = 3
"""Steps of a decode worker before something happens to it: some tokens were sent, and some are still to come."""


def column(make: Column) -> Column:
    """Enter a column under its own name."""
    COLUMNS[make.__name__.replace("_", " ")] = make
    return make


async def one_engine(model: Path, feature: Feature) -> Answer:
    """A decode worker that computes the prompt itself and is left alone: what all others are compared with."""
    async with world(model, Setup(settings=LOCAL)) as made:
        answer = await made.ask(feature)
        assert made.count("prefill", "num_requests") == 0
        assert made.count("decode", "num_preemptions") == 0
        return answer


# ---- paths


@column
async def prefill_and_decode(model: Path, feature: Feature) -> Answer:
    async with world(model) as made:
        answer = await made.ask(feature)
        assert made.count("prefill", "num_leases_done") > 0
        assert made.count("decode", "num_transfers") > 0
        assert made.count("decode", "recomputed_tokens") == 0
        return answer


@column
async def streamed_hand_over(model: Path, feature: Feature) -> Answer:
    """Decode has read the first chunk of the prompt before prefill computes the last one."""
    async with world(model, Setup(options=STREAMED, chunk_tokens=CHUNK, steps={"prefill": 1})) as made:
        async with asking(made, feature) as answering:
            await made.waiting_engine("prefill")
            await until(lambda: _num_read_blocks(made) > 0, timeout_s=60)
        answer = await answering
        assert made.count("decode", "num_streamed_blocks") > 0
        return answer


def _num_read_blocks(made: World) -> int:
    """What decode has read so far; reports tell of it only after a step."""
    connector = made.engine("decode-0")._thread.core.connector
    assert connector is not None
    return connector.stats().num_blocks


@column
async def steps_that_run_ahead(model: Path, feature: Feature) -> Answer:
    async with world(model, Setup(scheduler={"async_scheduling": True})) as made:
        answer = await made.ask(feature)
        assert made.count("decode", "num_transfers") > 0
        assert all(runner.num_overlaps > 0 for runner in made.watched)
        return answer


@column
async def own_prefix_cache(model: Path, feature: Feature) -> Answer:
    async with world(model, Setup(settings=LOCAL)) as made:
        await made.ask(feature)
        num_hits = made.count("decode", "prefix_hit_tokens")
        answer = await made.ask(feature)
        assert (made.count("decode", "prefix_hit_tokens") > num_hits) == (not feature.is_computed_anew)
        assert made.count("prefill", "num_requests") == 0
        return answer


@column
async def prefix_cache_of_a_peer(model: Path, feature: Feature) -> Answer:
    """Prefill finds the prompt in its cache, decode does not, and reads it."""
    async with world(model) as made:
        await made.ask(feature)
        await made.rest()
        assert await made.engine("decode-0").reset_prefix_cache(preempt_running=False) is not None
        num_hits, num_transfers = made.count("prefill", "prefix_hit_tokens"), made.count("decode", "num_transfers")
        answer = await made.ask(feature)
        assert (made.count("prefill", "prefix_hit_tokens") > num_hits) == (not feature.is_computed_anew)
        assert made.count("decode", "num_transfers") > num_transfers
        return answer


@column
async def host_tier(model: Path, feature: Feature) -> Answer:
    """Both caches have evicted the prompt, and both host tiers have kept it."""
    async with world(model, Setup(options=WITH_HOST_TIER, num_blocks=FEW_BLOCKS)) as made:
        await made.ask(feature)
        await _evict(made)
        num_loaded = {role: made.count(role, "num_host_loaded_blocks") for role in ("prefill", "decode")}
        answer = await made.ask(feature)
        assert made.count("decode", "num_host_loaded_blocks") > num_loaded["decode"]
        is_read = made.count("prefill", "num_host_loaded_blocks") > num_loaded["prefill"]
        assert is_read == (not feature.is_computed_anew)
        return answer


async def _evict(made: World) -> None:
    """Fill both caches with other prompts."""
    for number in range(3):
        prompt = [100 + number] * (FEW_BLOCKS * 16 // 2)
        await made.rest()
        await made.post("/v1/completions", {**COMPLETION, "prompt": prompt, "max_tokens": 2})
    await made.rest()


# ---- faults


@column
async def failed_blocks(model: Path, feature: Feature) -> Answer:
    """No read of decode succeeds."""
    async with world(model, Setup(options=suffering(FaultOptions(read_fails=1.0)))) as made:
        answer = await made.ask(feature)
        _assert_damaged(made)
        return answer


@column
async def corrupted_block(model: Path, feature: Feature) -> Answer:
    async with world(model, Setup(options=suffering(FaultOptions(bit_flips=1.0)))) as made:
        answer = await made.ask(feature)
        assert made.count("decode", "num_corrupt_blocks") > 0
        _assert_damaged(made)
        return answer


@column
async def expired_lease(model: Path, feature: Feature) -> Answer:
    async with world(model, Setup(options=suffering(FaultOptions(lease_expired=1.0)))) as made:
        answer = await made.ask(feature)
        assert made.count("prefill", "num_leases_expired") > 0
        _assert_damaged(made)
        return answer


@column
async def replaced_source(model: Path, feature: Feature) -> Answer:
    """Where decode reads, another engine answers than the one that it met."""
    impatient = replace(PLAIN, load_timeout_s=0.3, answer_timeout_s=0.1, lease_ttl_s=0.5)
    async with world(model, Setup(options=suffering(FaultOptions(peer_replaced=1.0), impatient))) as made:
        answer = await made.ask(feature)
        assert made.count("decode", "num_injected_faults") > 0
        _assert_damaged(made)
        return answer


@column
async def lost_kv_prefilled_again(model: Path, feature: Feature) -> Answer:
    """Decode does not compute what it could not read: prefill does, once more."""
    faults = FaultOptions(schedule=(ScheduledFault(fault=Fault.LEASE_EXPIRED, nth=1),))
    settings = replace(RECOMPUTES, kv_lost_policy="retry")
    async with world(model, Setup(options=suffering(faults), settings=settings)) as made:
        answer = await made.ask(feature)
        assert made.service.counters.num_prefill_retries > 0
        assert made.count("decode", "failed_blocks") > 0
        return answer


def _assert_damaged(made: World) -> None:
    assert made.count("decode", "failed_blocks") > 0
    assert made.count("decode", "recomputed_tokens") > 0


@column
async def killed_prefill_worker(model: Path, feature: Feature) -> Answer:
    """It dies while it computes the prompt, and another one begins anew."""
    async with world(model, Setup(num_prefill=2, chunk_tokens=CHUNK, steps={"prefill": 1})) as made:
        async with asking(made, feature) as answering:
            await made.kill(await made.waiting_engine("prefill"))
        answer = await answering
        assert made.service.counters.num_prefill_retries > 0
        assert made.count("prefill", "num_leases_done") > 0
        return answer


@column
async def killed_decode_worker(model: Path, feature: Feature) -> Answer:
    """It dies in the middle of the answer, and another one goes on behind the last token that was sent."""
    async with world(model, Setup(num_decode=2, steps={"decode": STEPS_BEFORE})) as made:
        async with asking(made, feature) as answering:
            victim = await made.waiting_engine("decode")
            await made.kill(victim)
        answer = await answering
        assert made.engine(victim).load.counters["num_generated_tokens"] > 0
        assert made.service.counters.num_migrations > 0
        assert made.count("decode", "num_generated_tokens") > 0
        return answer


@column
async def drained_decode_worker(model: Path, feature: Feature) -> Answer:
    """It is told to go in the middle of the answer, and another one goes on with its KV."""
    async with world(model, Setup(num_decode=2, steps={"decode": STEPS_BEFORE})) as made:
        async with asking(made, feature) as answering:
            leaving = await made.waiting_engine("decode")
            draining = asyncio.create_task(made.decode.drain(leaving))
            await until(lambda: made.engine(leaving).is_draining)
            made.let_go()
            await draining
        answer = await answering
        assert made.engine(leaving).load.counters["num_moved_out"] > 0
        assert made.service.counters.num_drain_moves > 0
        assert made.service.counters.num_migrations == 0
        assert made.count("decode", "recomputed_tokens") == 0
        return answer


@column
async def preemption(model: Path, feature: Feature) -> Answer:
    scheduler = {"artificial_preemption_probability": 0.5, "max_num_artificial_preemptions": 3}
    async with world(model, Setup(scheduler=scheduler)) as made:
        answer = await made.ask(feature)
        assert made.count("decode", "num_preemptions") > 0
        return answer


@column
async def cache_reset(model: Path, feature: Feature) -> Answer:
    """All workers drop what they have computed in the middle of the answer."""
    async with world(model, Setup(steps={"decode": STEPS_BEFORE})) as made:
        async with asking(made, feature) as answering:
            await made.waiting_engine("decode")
            resetting = asyncio.create_task(made.service.administration.reset_prefix_cache(preempt_running=True))
            await asyncio.sleep(0)
            made.let_go()
            told = await resetting
        answer = await answering
        assert sum(item.dropped.num_preempted for item in told if item.dropped is not None) > 0
        return answer
