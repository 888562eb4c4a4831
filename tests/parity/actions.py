"""What is done to the worlds of the parity matrix's columns while they answer, or before."""

from __future__ import annotations

import asyncio

from tests.support.engine.layered_runner import LayeredRunner
from tests.support.parity.answers import Answer
from tests.support.parity.feature import COMPLETION, Feature
from tests.support.parity.halved_prompts import halved_prompts
from tests.support.parity.waiting_moves import move_waiting
from tests.support.parity.world import World, asking
from tests.support.router.router_rig import until

FEW_BLOCKS = 40
MAX_WARM_UPS = 30


async def twice(made: World, feature: Feature) -> Answer:
    """Send the same request twice."""
    await made.ask(feature)
    await made.rest()
    made.count_anew()
    return await made.ask(feature)


async def after_a_reset_of_decode(made: World, feature: Feature) -> Answer:
    """Prefill finds the prompt in its cache, decode does not, and reads it."""
    await made.ask(feature)
    await made.rest()
    assert await made.engine(made.first("decode")).reset_prefix_cache(preempt_running=False) is not None
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
    connector = made.engine(made.first("decode"))._thread.core.connector
    assert connector is not None
    num_before = connector.stats().num_blocks  # reports tell of it only after a step
    async with asking(made, feature) as answering:
        await made.waiting_engine("prefill")
        await until(lambda: connector.stats().num_blocks > num_before, timeout_s=60)
    return await answering


async def within_a_step(made: World, feature: Feature) -> Answer:
    """Decode is inside a step of another request when the prompt is handed over, and reads it before the step ends.

    A request whose grammar is still compiled would wait for the next step, so such ones are asked before.
    """
    if feature.has_grammar:
        await made.ask(feature)
        await made.rest()
        await made.begin()
    core = made.engine(made.first("decode"))._thread.core
    connector = core.connector
    assert connector is not None
    core.runner = runner = LayeredRunner(core.runner, core.between_layers)
    runner.hold()
    try:
        other = asyncio.create_task(
            made.post("/v1/completions", {**COMPLETION, "prompt": [[90] * 40], "max_tokens": 3})
        )
        await until(lambda: runner.num_layers > 0, timeout_s=60)
        num_before = connector.stats().num_transfers
        answering = asyncio.create_task(made.ask(feature))
        await until(lambda: connector.stats().num_transfers > num_before, timeout_s=60)
        assert runner.num_steps == 0, "the step of the other request has not ended"
    finally:
        runner.let_go()
    await other
    answer = await answering
    await made.rest()
    core.runner = runner.inner
    return answer


async def killing_prefill(made: World, feature: Feature) -> Answer:
    """The worker dies while it computes the prompt, and another one starts again."""
    return await _killing_while_it_computes(made, feature, "prefill")


async def killing_a_mixed_one(made: World, feature: Feature) -> Answer:
    """A mixed worker dies while it computes the prompt, and a prefill worker starts again."""
    return await _killing_while_it_computes(made, feature, "mixed")


async def _killing_while_it_computes(made: World, feature: Feature, role: str) -> Answer:
    async with asking(made, feature) as answering:
        await made.kill(await made.waiting_engine(role))
    return await answering


async def killing_decode(made: World, feature: Feature) -> Answer:
    """The worker dies in the middle of the answer, and another one continues after the last token that was sent."""
    async with asking(made, feature) as answering:
        victim = await made.waiting_engine("decode")
        assert made.count(f"{victim} num_generated_tokens") > 0
        await made.kill(victim)
    return await answering


async def draining_decode(made: World, feature: Feature) -> Answer:
    """The worker is drained in the middle of the answer, and another one continues with its KV."""
    return await _draining(made, feature, "decode")


async def draining_a_mixed_one(made: World, feature: Feature) -> Answer:
    """There are only mixed workers left. The one that does everything is drained in the middle of the answer."""
    for role in ("prefill", "decode"):
        await made.pools[role].drain(made.first(role))
    await until(lambda: {item.role for item in made.service.decode_pool.candidates()} == {"mixed"})
    return await _draining(made, feature, "mixed")


async def _draining(made: World, feature: Feature, role: str) -> Answer:
    async with asking(made, feature) as answering:
        leaving = await made.waiting_engine(role)
        draining = asyncio.create_task(made.pools[role].drain(leaving))
        await until(lambda: made.engine(leaving).is_draining)
        made.let_go()
        await draining
    return await answering


async def rebalancing(made: World, feature: Feature) -> Answer:
    """The requests of a worker are ordered in the middle of the answer to continue on the other one, with their KV."""
    async with asking(made, feature) as answering:
        source = await made.waiting_engine("decode")
        (target,) = set(made.decode.engines) - {source}
        num_before = len(made.decode.ordered)
        moving = asyncio.create_task(made.service.administration.move(source, target, num_streams=100))
        await until(lambda: len(made.decode.ordered) > num_before)
        made.let_go()
        told = await moving
    assert (told.source, told.target) == (source, target)
    return await answering


async def moving_while_it_waits(made: World, feature: Feature) -> Answer:
    """Both workers are in a step of others when the requests come, which are told to go before theirs looks at them."""
    others = [
        asyncio.create_task(made.post("/v1/completions", {**COMPLETION, "prompt": [[number] * 40], "max_tokens": 3}))
        for number in (80, 90)
    ]
    await until(lambda: all(runner.is_waiting for runner in made.runners.values()), timeout_s=60)
    num_before = len(made.decode.submitted)
    answering = asyncio.create_task(made.ask(feature))
    await until(lambda: len(made.decode.submitted) > num_before)
    sent = {request.request_id for request in made.decode.submitted[num_before:]}
    num_ordered = len(made.decode.ordered)
    moving = move_waiting(made.service, sent)
    await until(lambda: len(made.decode.ordered) == num_ordered + len(moving))
    made.let_go()
    await asyncio.gather(*others, *moving)
    return await answering


async def resetting_caches(made: World, feature: Feature) -> Answer:
    """All workers drop what they have computed in the middle of the answer."""
    async with asking(made, feature) as answering:
        await made.waiting_engine("decode")
        num_before = len(made.decode.resets)
        resetting = asyncio.create_task(made.service.administration.reset_prefix_cache(preempt_running=True))
        await until(lambda: len(made.decode.resets) > num_before)
        made.let_go()
        told = await resetting
    assert sum(item.dropped.num_preempted for item in told if item.dropped is not None) > 0
    return await answering


async def _swap_roles(made: World) -> None:
    await made.lean({made.first("prefill"): "decode", made.first("decode"): "prefill"})


async def with_swapped_roles(made: World, feature: Feature) -> Answer:
    """The worker that was started for prompts generates, and the other one computes prompts."""
    await _swap_roles(made)
    return await made.ask(feature)


async def changing_roles(made: World, feature: Feature) -> Answer:
    """In the middle of the answer each of the workers leans to what the other one did."""
    async with asking(made, feature) as answering:
        await made.waiting_engine("decode")
        changing = asyncio.create_task(_swap_roles(made))
        await until(lambda: made.engine(made.first("decode")).leaning == "prefill")
        made.let_go()
        await changing
    return await answering


async def draining_a_swapped_one(made: World, feature: Feature) -> Answer:
    """A worker that was started for prompts generates, and is drained in the middle of that."""
    await _swap_roles(made)
    return await _draining(made, feature, "prefill")


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
    with halved_prompts(made.service, head=made.first("prefill"), tail=made.first("decode")):
        answer = await made.ask(feature)
    may_be_split = not (feature.is_beam_search or feature.is_computed_anew)
    assert (made.count("router num_placed_split") > 0) == may_be_split
    return answer


async def halved_and_lost(made: World, feature: Feature) -> Answer:
    """The worker that computes the rest is lost when some tokens were sent."""
    with halved_prompts(made.service, head=made.first("prefill"), tail=made.first("decode")):
        async with asking(made, feature) as answering:
            await made.kill(await made.waiting_engine("decode"))
        return await answering
