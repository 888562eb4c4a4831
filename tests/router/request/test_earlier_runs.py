"""A request that comes back to a worker where it was given up: what is late of its earlier run does not concern it."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from tests.support.engine.chain_runner import expected_tokens
from tests.support.loop_time import LoopTime
from tests.support.router.live_router import Live, live_router, token_ids
from tests.support.router.router_rig import FAST, router_rig, until

PROMPT = [5, 6, 7]


async def test_lease_of_a_lost_hand_over_can_be_ended_while_the_prompt_is_computed_there_again(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=dataclasses.replace(FAST, kv_lost_policy="retry")) as rig:
        replica = rig.prefill[0]
        replica.abort_gate.clear()
        rig.decode[0].lost_loads = 1
        answer = asyncio.create_task(rig.complete(PROMPT, max_tokens=40, ignore_eos=True))
        await until(lambda: len(replica.seen) == 2)
        replica.abort_gate.set()

        assert (await answer).status_code == 200
        await until(rig.is_at_rest)
        lost, again = [request.request_id for request in replica.seen]
        assert lost != again
        assert replica.aborted == [lost]


def num_generated(live: Live) -> float:
    return sum(load.counters["num_generated_tokens"] for load in live.loads())


@pytest.mark.parametrize("is_abort_later", [False, True])
async def test_late_tokens_and_the_late_end_of_an_earlier_run_are_not_taken_for_the_next_ones(
    model_dir: Path, is_abort_later: bool
) -> None:
    """The only decode worker generates while its answer is lost; the abort comes before or behind the next run."""
    settings = dataclasses.replace(FAST, submit_timeout_s=30.0, abort_timeout_s=300.0)
    async with live_router(model_dir, settings=settings, turns_per_step=1000) as live:
        time = LoopTime()
        live.decode.answer_gate.clear()
        live.decode.abort_gate.clear()
        answer = asyncio.create_task(live.complete(PROMPT, max_tokens=150))
        await until(lambda: num_generated(live) > 4)
        time.advance(30.0)
        if not is_abort_later:
            live.decode.abort_gate.set()
        await until(lambda: len(live.decode.submitted) > 1)
        num_before = num_generated(live)
        await until(lambda: num_generated(live) > num_before + 2)
        live.decode.answer_gate.set()
        live.decode.abort_gate.set()

        assert token_ids(await answer) == expected_tokens(PROMPT, 150)
        assert len(live.decode.submitted) == 2
        await until(live.is_at_rest)
