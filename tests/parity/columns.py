"""The columns of the parity matrix. To add one, say what is built, what is done to it, and what is counted then."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from engine.contract.config import SpeculativeConfig
from engine.drafting.proposer import Drafting
from engine.drafting.registry import make_drafting
from kv_transfer.fault_options import Fault, FaultOptions, ScheduledFault
from tests.support.engine.proposers import Remembering
from tests.support.parity.answers import Answer
from tests.support.parity.column import Column
from tests.support.parity.feature import COMPLETION, Feature
from tests.support.parity.halved_prompts import halved_prompts
from tests.support.parity.setup import BY_LEANING, ELASTIC, LOCAL, PLAIN, RECOMPUTES, STREAMED, Setup, suffering
from tests.support.parity.world import World, asking
from tests.support.router.router_rig import until

CHUNK = 32
FEW_BLOCKS = 40
STEPS_BEFORE = 3
"""Steps of a decode worker before something happens to it: some tokens were sent, and some are still to come."""

DAMAGED = ("decode failed_blocks", "decode recomputed_tokens")
DRAFTS = 3
MAX_WARM_UPS = 30

ONE_ENGINE = Column(
    name="one engine",
    setup=Setup(settings=LOCAL),
    stay=("prefill num_requests", "decode num_preemptions"),
)
"""A decode worker that computes the prompt itself and is left alone: what all others are compared with."""


# ---- what is done


async def twice(made: World, feature: Feature) -> Answer:
    """What was asked before is asked again."""
    await made.ask(feature)
    await made.rest()
    made.count_anew()
    return await made.ask(feature)


async def after_a_reset_of_decode(made: World, feature: Feature) -> Answer:
    """Prefill finds the prompt in its cache, decode does not, and reads it."""
    await made.ask(feature)
    await made.rest()
    assert await made.engine("decode-0").reset_prefix_cache(preempt_running=False) is not None
    made.count_anew()
    return await made.ask(feature)


async def after_an_eviction(made: World, feature: Feature) -> Answer:
    """Both caches have evicted the prompt, and both tiers have kept it."""
    await made.ask(feature)
    await made.rest()
    # Short ones: of a long prompt decode is handed over no more than its window.
    others = [[100 + number] * 40 for number in range(FEW_BLOCKS)]
    await made.post("/v1/completions", {**COMPLETION, "prompt": others, "max_tokens": 2})
    await made.rest()
    made.count_anew()
    return await made.ask(feature)


async def while_it_is_computed(made: World, feature: Feature) -> Answer:
    """Decode has read something of the prompt before prefill computes the last chunk."""
    connector = made.engine("decode-0")._thread.core.connector
    assert connector is not None
    num_before = connector.stats().num_blocks  # reports tell of it only after a step
    async with asking(made, feature) as answering:
        await made.waiting_engine("prefill")
        await until(lambda: connector.stats().num_blocks > num_before, timeout_s=60)
    return await answering


async def killing_prefill(made: World, feature: Feature) -> Answer:
    """The worker dies while it computes the prompt, and another one begins anew."""
    async with asking(made, feature) as answering:
        await made.kill(await made.waiting_engine("prefill"))
    return await answering


async def killing_decode(made: World, feature: Feature) -> Answer:
    """The worker dies in the middle of the answer, and another one goes on behind the last token that was sent."""
    async with asking(made, feature) as answering:
        victim = await made.waiting_engine("decode")
        await made.kill(victim)
    assert made.engine(victim).load.counters["num_generated_tokens"] > 0
    return await answering


async def draining_decode(made: World, feature: Feature) -> Answer:
    """The worker is told to go in the middle of the answer, and another one goes on with its KV."""
    async with asking(made, feature) as answering:
        leaving = await made.waiting_engine("decode")
        draining = asyncio.create_task(made.decode.drain(leaving))
        await until(lambda: made.engine(leaving).is_draining)
        made.let_go()
        await draining
    return await answering


async def rebalancing(made: World, feature: Feature) -> Answer:
    """The requests of a worker are told to go on at the other one in the middle of the answer, with their KV."""
    async with asking(made, feature) as answering:
        source = await made.waiting_engine("decode")
        (target,) = set(made.decode.engines) - {source}
        moving = asyncio.create_task(made.service.administration.move(source, target, num_streams=100))
        await until(lambda: bool(made.decode.ordered))
        made.let_go()
        told = await moving
    assert (told.source, told.target) == (source, target)
    return await answering


async def resetting_caches(made: World, feature: Feature) -> Answer:
    """All workers drop what they have computed in the middle of the answer."""
    async with asking(made, feature) as answering:
        await made.waiting_engine("decode")
        resetting = asyncio.create_task(made.service.administration.reset_prefix_cache(preempt_running=True))
        await asyncio.sleep(0)
        made.let_go()
        told = await resetting
    assert sum(item.dropped.num_preempted for item in told if item.dropped is not None) > 0
    return await answering


SWAPPED = {"prefill-0": "decode", "decode-0": "prefill"}


async def with_swapped_roles(made: World, feature: Feature) -> Answer:
    """The worker that was started for prompts generates, and the other one computes prompts."""
    await made.lean(SWAPPED)
    return await made.ask(feature)


async def changing_roles(made: World, feature: Feature) -> Answer:
    """In the middle of the answer each of the workers leans to what the other one did."""
    async with asking(made, feature) as answering:
        await made.waiting_engine("decode")
        changing = asyncio.create_task(made.lean(SWAPPED))
        await until(lambda: made.engine("decode-0").leaning == "prefill")
        made.let_go()
        await changing
    return await answering


async def draining_a_swapped_one(made: World, feature: Feature) -> Answer:
    """A worker that was started for prompts generates, and is told to go in the middle of it."""
    await made.lean(SWAPPED)
    async with asking(made, feature) as answering:
        leaving = await made.waiting_engine("prefill")
        draining = asyncio.create_task(made.prefill.drain(leaving))
        await until(lambda: made.engine(leaving).is_draining)
        made.let_go()
        await draining
    return await answering


async def once_predicted(made: World, feature: Feature) -> Answer:
    """The router has seen enough steps to choose by predictions."""
    unknown = "router num_placed_models_unknown"
    for _ in range(MAX_WARM_UPS):
        num_before = made.count(unknown)
        await made.post("/v1/completions", {**COMPLETION, "prompt": [[90] * 40, [80] * 60]})
        await made.rest()
        if made.count(unknown) == num_before:
            break
    made.count_anew()
    return await made.ask(feature)


async def halved(made: World, feature: Feature) -> Answer:
    """One worker computes the first half of the prompt, another the rest."""
    with halved_prompts(made.service, head="prefill-0", tail="decode-0"):
        answer = await made.ask(feature)
    may_be_split = not (feature.is_beam_search or feature.is_computed_anew)
    assert (made.count("router num_placed_split") > 0) == may_be_split
    return answer


async def halved_and_lost(made: World, feature: Feature) -> Answer:
    """The worker that computes the rest is lost when some tokens were sent."""
    with halved_prompts(made.service, head="prefill-0", tail="decode-0"):
        async with asking(made, feature) as answering:
            await made.kill(await made.waiting_engine("decode"))
        return await answering


# ---- what is built

PATHS = (
    Column(
        name="prefill and decode",
        setup=Setup(),
        grow=("prefill num_leases_done", "decode num_transfers"),
        stay=("decode recomputed_tokens",),
    ),
    Column(
        name="streamed hand over",
        setup=Setup(options=STREAMED, chunk_tokens=CHUNK, steps={"prefill": 2}),
        ask=while_it_is_computed,
        grow=("decode num_streamed_blocks",),
    ),
    Column(
        name="steps that run ahead",
        setup=Setup(scheduler={"async_scheduling": True}),
        grow=("decode num_transfers",),
        grow_without_beams=("runners num_overlaps",),
    ),
    Column(
        name="drafts",
        setup=Setup(drafting=lambda: Drafting(proposer=Remembering(), max_draft_tokens=DRAFTS)),
        ask=twice,
        grow_without_beams=("decode num_draft_tokens", "decode num_accepted_draft_tokens"),
    ),
    Column(
        name="drafts out of earlier answers",
        setup=Setup(drafting=lambda: make_drafting(SpeculativeConfig(method="suffix", num_tokens=DRAFTS))),
        ask=twice,
        grow_without_beams=("decode num_draft_tokens", "decode num_accepted_draft_tokens"),
    ),
    Column(
        name="drafts of a model",
        setup=Setup(is_own_draft=True),
        grow_without_beams=("decode num_draft_tokens", "decode num_accepted_draft_tokens"),
    ),
    Column(
        name="several decode steps at once",
        setup=Setup(scheduler={"max_decode_steps": 4}),
        grow=("decode num_transfers",),
    ),
    Column(
        name="own prefix cache",
        setup=Setup(settings=LOCAL),
        ask=twice,
        grow_with_caches=("decode prefix_hit_tokens",),
        stay=("prefill num_requests",),
    ),
    Column(
        name="prefix cache of a peer",
        setup=Setup(),
        ask=after_a_reset_of_decode,
        grow=("decode num_transfers",),
        grow_with_caches=("prefill prefix_hit_tokens",),
    ),
    *(
        Column(
            name=f"{tier} tier",
            setup=Setup(tier=tier, num_blocks=FEW_BLOCKS),
            ask=after_an_eviction,
            grow=(f"decode num_{tier}_loaded_blocks",),
            grow_with_caches=(f"prefill num_{tier}_loaded_blocks",),
        )
        for tier in ("host", "disk")
    ),
)

FAULTS = (
    Column(name="failed blocks", setup=Setup(options=suffering(FaultOptions(read_fails=1.0))), grow=DAMAGED),
    Column(
        name="corrupted block",
        setup=Setup(options=suffering(FaultOptions(bit_flips=1.0))),
        grow=("decode num_corrupt_blocks", *DAMAGED),
    ),
    Column(
        name="expired lease",
        setup=Setup(options=suffering(FaultOptions(lease_expired=1.0))),
        grow=("prefill num_leases_expired", *DAMAGED),
    ),
    Column(  # where decode reads, another engine answers than the one that it met
        name="replaced source",
        setup=Setup(
            options=suffering(
                FaultOptions(peer_replaced=1.0),
                replace(PLAIN, load_timeout_s=0.3, answer_timeout_s=0.1, lease_ttl_s=0.5),
            )
        ),
        grow=("decode num_injected_faults", *DAMAGED),
        is_left_whole=False,
    ),
    Column(  # decode does not compute what it could not read: prefill does, once more
        name="lost kv prefilled again",
        setup=Setup(
            options=suffering(FaultOptions(schedule=(ScheduledFault(fault=Fault.LEASE_EXPIRED, nth=1),))),
            settings=replace(RECOMPUTES, kv_lost_policy="retry"),
        ),
        grow=("router num_prefill_retries", "decode failed_blocks"),
        is_left_whole=False,
    ),
    Column(
        name="killed prefill worker",
        setup=Setup(num_prefill=2, chunk_tokens=CHUNK, steps={"prefill": 1}),
        ask=killing_prefill,
        grow=("router num_prefill_retries", "prefill num_leases_done"),
        is_left_whole=False,
    ),
    Column(
        name="killed decode worker",
        setup=Setup(num_decode=2, steps={"decode": STEPS_BEFORE}),
        ask=killing_decode,
        grow=("router num_migrations", "decode num_generated_tokens"),
        is_left_whole=False,
    ),
    Column(
        name="drained decode worker",
        setup=Setup(num_decode=2, steps={"decode": STEPS_BEFORE}),
        ask=draining_decode,
        grow=("decode num_moved_out", "router num_drain_moves"),
        stay=("router num_migrations", "decode recomputed_tokens"),
        is_left_whole=False,
    ),
    Column(
        name="rebalanced mid stream",
        setup=Setup(num_decode=2, steps={"decode": STEPS_BEFORE}),
        ask=rebalancing,
        grow=("decode num_moved_out", "router num_ordered_moves"),
        stay=("router num_migrations", "router num_drain_moves", "decode recomputed_tokens"),
        is_left_whole=False,
    ),
    Column(
        name="moved with a part of its prompt",
        setup=Setup(
            settings=LOCAL,
            num_decode=2,
            steps={"decode": 1},
            scheduler={"long_prefill_token_threshold": CHUNK},
        ),
        ask=rebalancing,
        grow=("decode num_moved_out", "router num_ordered_moves"),
        stay=("router num_migrations", "router num_drain_moves", "prefill num_requests"),
        is_left_whole=False,
    ),
    Column(
        name="preemption",
        setup=Setup(scheduler={"artificial_preemption_probability": 0.5, "max_num_artificial_preemptions": 3}),
        grow=("decode num_preemptions",),
        is_left_whole=False,
    ),
    Column(name="cache reset", setup=Setup(steps={"decode": STEPS_BEFORE}), ask=resetting_caches),
)

ROLES = (
    Column(
        name="elastic roles",
        setup=Setup(settings=BY_LEANING),
        grow=("router num_placed_override", "prefill num_leases_done", "decode num_transfers"),
        stay=("decode recomputed_tokens",),
    ),
    Column(
        name="elastic roles by predictions",
        setup=Setup(settings=ELASTIC),
        ask=once_predicted,
        stay=(
            "router num_placed_models_unknown",
            "router num_placed_override",
            "prefill recomputed_tokens",
            "decode recomputed_tokens",
        ),
    ),
    Column(name="prompt split", setup=Setup(settings=BY_LEANING), ask=halved, grow=("decode num_transfers",)),
    Column(
        name="prompt split, then killed",
        setup=Setup(settings=BY_LEANING, num_decode=2, steps={"decode": STEPS_BEFORE}),
        ask=halved_and_lost,
        grow=("router num_migrations",),
        is_left_whole=False,
    ),
    Column(
        name="swapped roles",
        setup=Setup(settings=BY_LEANING),
        ask=with_swapped_roles,
        grow=("decode num_leases_done", "prefill num_transfers"),
        stay=("decode num_transfers", "prefill recomputed_tokens"),
    ),
    Column(
        name="role changed mid-stream",
        setup=Setup(settings=BY_LEANING, steps={"decode": STEPS_BEFORE}),
        ask=changing_roles,
        grow=("decode num_generated_tokens",),
        stay=("router num_migrations", "router num_drain_moves", "decode recomputed_tokens"),
        is_left_whole=False,
    ),
    Column(
        name="drained prefill worker that generates",
        setup=Setup(settings=BY_LEANING, steps={"prefill": STEPS_BEFORE}),
        ask=draining_a_swapped_one,
        grow=("prefill num_moved_out", "router num_drain_moves"),
        stay=("router num_migrations", "decode recomputed_tokens"),
        is_left_whole=False,
    ),
    Column(  # the only one left has computed the prompt
        name="killed decode worker with elastic roles",
        setup=Setup(settings=BY_LEANING, steps={"decode": STEPS_BEFORE}),
        ask=killing_decode,
        grow=("router num_migrations", "prefill num_generated_tokens"),
        is_left_whole=False,
    ),
)

COLUMNS = {column.name: column for column in (*PATHS, *FAULTS, *ROLES)}
