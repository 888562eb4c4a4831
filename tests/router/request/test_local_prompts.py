"""Decode workers compute prompts themselves while prefill workers are far behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.router.fake_workers import counting
from tests.support.router.router_rig import FAST, RouterRig, router_rig, until

LEAD = replace(FAST, max_prefill_queue_lead=100)
ASK = {"max_tokens": 4, "temperature": 0, "return_token_ids": True}


def hold_prefill(rig: RouterRig) -> None:
    """Prefill accepts prompts and computes none."""
    for replica in rig.prefill.replicas.values():
        replica.gate.clear()


async def fill_queue(rig: RouterRig, num_tokens: int) -> asyncio.Task[object]:
    """Let a prompt of that many tokens wait at prefill."""
    waiting: asyncio.Task[object] = asyncio.create_task(rig.complete([7] * num_tokens, **ASK))
    await until(lambda: bool(rig.prefill[0].seen))
    return waiting


@pytest.mark.parametrize(("num_waiting", "is_local"), [(100, False), (101, True)])
async def test_a_prompt_goes_to_decode_once_the_queue_leads_by_more_than_the_bound(
    model_dir: Path, num_waiting: int, is_local: bool
) -> None:
    async with router_rig(model_dir, settings=LEAD) as rig:
        hold_prefill(rig)
        waiting = await fill_queue(rig, num_waiting)

        answer = asyncio.create_task(rig.complete([5] * 30, **ASK))
        await until(lambda: bool(rig.decode[0].seen) or len(rig.prefill[0].seen) == 2)
        rig.prefill[0].gate.set()
        body = (await answer).json()
        await waiting

        request = next(item for item in rig.decode[0].seen if len(item.prompt_token_ids) == 30)
        assert body["choices"][0]["token_ids"] == [counting(request, position) for position in range(4)]
        assert (request.kv_transfer is None) is is_local
        assert rig.service.counters.num_local_prefills == is_local
        await until(rig.is_at_rest)


async def test_what_is_sent_to_decode_counts_in_its_queue_at_once(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=LEAD) as rig:
        hold_prefill(rig)
        waiting = await fill_queue(rig, 150)
        rig.decode[0].submit_gate.clear()

        first = asyncio.create_task(rig.complete([5] * 60, **ASK))
        await until(lambda: rig.service.counters.num_local_prefills == 1)
        second = asyncio.create_task(rig.complete([6] * 60, **ASK))
        await until(lambda: len(rig.prefill[0].seen) == 2)
        rig.decode[0].submit_gate.set()
        rig.prefill[0].gate.set()
        await asyncio.gather(waiting, first, second)

        assert rig.service.counters.num_local_prefills == 1
        await until(rig.is_at_rest)


async def test_choices_of_one_prompt_are_computed_where_the_first_is(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=LEAD) as rig:
        hold_prefill(rig)
        waiting = await fill_queue(rig, 150)

        body = (await rig.complete([5] * 30, n=3, **ASK)).json()
        num_prefilled = len(rig.prefill[0].seen)
        rig.prefill[0].gate.set()
        await waiting

        assert len(body["choices"]) == 3
        assert num_prefilled == 1, "the one that waited"
        await until(rig.is_at_rest)


async def test_choices_that_find_no_room_beside_the_first_do_not_take_its_blocks_for_theirs(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=2, settings=LEAD) as rig:
        hold_prefill(rig)
        waiting = await fill_queue(rig, 150)
        for replica in rig.decode.replicas.values():
            replica.step_gate.clear()

        answer = asyncio.create_task(rig.complete([5] * 30, n=2, **ASK))
        await until(lambda: any(replica.running for replica in rig.decode.replicas.values()))
        first, other = sorted(rig.decode.replicas.values(), key=lambda replica: not replica.running)
        first.refuse_code = "draining"
        await until(lambda: any(not replica.takes_requests for replica in rig.service.decode_pool.replicas))
        rig.prefill[0].gate.set()
        await until(lambda: rig.service.prefill_pool.fewest_queued_tokens() == 0)
        first.step_gate.set()
        other.step_gate.set()
        await waiting
        body = (await answer).json()

        assert [len(choice["token_ids"]) for choice in body["choices"]] == [4, 4]
        assert [len(request.prompt_token_ids) for request in rig.prefill[0].seen] == [150, 30]
        (second,) = (request for request in other.seen if len(request.prompt_token_ids) == 30)
        assert second.kv_transfer is not None
        assert rig.service.counters.num_local_prefills == 1
        await until(rig.is_at_rest)


async def test_unless_it_is_asked_for_prompts_wait_for_prefill(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        hold_prefill(rig)
        waiting = await fill_queue(rig, 150)

        answer = asyncio.create_task(rig.complete([5] * 30, **ASK))
        await until(lambda: len(rig.prefill[0].seen) == 2)
        rig.prefill[0].gate.set()
        await asyncio.gather(waiting, answer)

        assert rig.service.counters.num_local_prefills == 0
