"""Streams that are ordered to leave a live worker continue on the other one, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from engine.contract.step_time import StepTimeModel
from router.errors import NoReplicaError
from tests.support.router.router_rig import FAST, RouterRig, router_rig, until

NUM_TOKENS = 60
KNOWN = StepTimeModel(base_s=0.001, prompt_token_s=0.0001, error=0.1, num_steps=50)


def texts(rig: RouterRig, number: int, **body: object) -> list[asyncio.Task[str]]:
    async def one(index: int) -> str:
        answer = await rig.complete([index + 1] * 5, max_tokens=NUM_TOKENS, seed=1, ignore_eos=True, **body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    return [asyncio.create_task(one(index)) for index in range(number)]


async def undisturbed(model_dir: Path, number: int) -> list[str]:
    async with router_rig(model_dir) as rig:
        return await asyncio.gather(*texts(rig, number))


def hold(rig: RouterRig) -> None:
    for replica in rig.decode.replicas.values():
        replica.step_gate.clear()


def let_go(rig: RouterRig) -> None:
    for replica in rig.decode.replicas.values():
        replica.step_gate.set()


async def all_at(rig: RouterRig, index: int, number: int) -> None:
    """Requests run at one worker, and make no step."""
    await until(lambda: len(rig.decode[index].running) == number)


async def test_streams_go_where_they_are_told_to_and_not_back(model_dir: Path) -> None:
    expected = await undisturbed(model_dir, 3)
    async with router_rig(model_dir, num_decode=3) as rig:
        rig.decode[1].refuse_code = rig.decode[2].refuse_code = "draining"
        await rig.service._refresh(wait=True)
        hold(rig)
        answers = texts(rig, 3)
        await all_at(rig, 0, 3)
        rig.decode[1].refuse_code = rig.decode[2].refuse_code = None
        await until(lambda: all(item.takes_requests for item in rig.service.decode_pool.replicas))

        told = await rig.service.administration.move("decode-0", "decode-2", num_streams=2)
        await all_at(rig, 2, 2)
        await rig.service.administration.move("decode-2", "decode-1", num_streams=1)  # and a second time
        await all_at(rig, 1, 1)
        let_go(rig)

        assert told.num_streams == 2
        assert await asyncio.gather(*answers) == expected
        counters = rig.service.counters
        assert (counters.num_ordered_moves, counters.num_drain_moves, counters.num_migrations) == (3, 0, 0)
        await until(rig.is_at_rest)


async def test_target_that_dies_during_the_move_is_not_waited_for(model_dir: Path) -> None:
    expected = await undisturbed(model_dir, 2)
    async with router_rig(model_dir, num_decode=2) as rig:
        rig.decode[1].refuse_code = "draining"
        await rig.service._refresh(wait=True)
        hold(rig)
        answers = texts(rig, 2)
        await all_at(rig, 0, 2)
        rig.decode[1].refuse_code = None
        await until(lambda: all(item.takes_requests for item in rig.service.decode_pool.replicas))

        await rig.service.administration.move("decode-0", "decode-1", num_streams=2)
        await all_at(rig, 1, 2)
        rig.decode.kill("decode-1")
        let_go(rig)

        assert await asyncio.gather(*answers) == expected
        assert rig.service.counters.num_migrations == 2
        await until(lambda: rig.service.num_alive == 0)


async def test_source_that_dies_with_the_order_loses_nothing(model_dir: Path) -> None:
    expected = await undisturbed(model_dir, 2)
    async with router_rig(model_dir, num_decode=2) as rig:
        hold(rig)
        answers = texts(rig, 2)
        await until(lambda: sum(len(item.running) for item in rig.decode.replicas.values()) == 2)
        source = max(rig.decode.replicas.values(), key=lambda item: len(item.running))
        rig.decode.kill(source.replica_id)

        with pytest.raises(NoReplicaError, match="killed by the test"):
            await rig.service.administration.move(source.replica_id, None, num_streams=2)
        let_go(rig)

        assert await asyncio.gather(*answers) == expected
        await until(lambda: rig.service.num_alive == 0)


async def test_client_that_leaves_during_the_move_leaves_nothing(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=2) as rig:
        hold(rig)
        (answer,) = texts(rig, 1)
        await until(lambda: any(item.running for item in rig.decode.replicas.values()))
        source = next(name for name, item in rig.decode.replicas.items() if item.running)

        moving = asyncio.create_task(rig.service.administration.move(source, None, num_streams=1))
        await until(lambda: bool(rig.decode.replicas[source].moved))
        answer.cancel()
        await moving
        let_go(rig)

        await until(rig.is_at_rest)
        assert rig.service.rebalancer.look() == {}


async def test_move_off_a_worker_that_drains_is_a_move_all_the_same(model_dir: Path) -> None:
    expected = await undisturbed(model_dir, 1)
    async with router_rig(model_dir, num_decode=2) as rig:
        hold(rig)
        answers = texts(rig, 1)
        await until(lambda: any(item.running for item in rig.decode.replicas.values()))
        source = next(name for name, item in rig.decode.replicas.items() if item.running)
        rig.decode.replicas[source].refuse_code = "draining"

        await rig.service.rebalancer.move(source, source, num_streams=1)  # it is no target any more
        let_go(rig)

        assert await asyncio.gather(*answers) == expected
        assert (
            rig.decode.replicas[source].seen[-1].output_token_ids
            == rig.decode.replicas[source].seen[0].output_token_ids
        )
        await until(rig.is_at_rest)


async def test_order_over_http_names_the_worker_and_how_many_go(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=2, settings=FAST) as rig:
        hold(rig)
        answers = texts(rig, 1, stream=False)
        await until(lambda: any(item.running for item in rig.decode.replicas.values()))
        source = next(name for name, item in rig.decode.replicas.items() if item.running)
        (target,) = set(rig.decode.replicas) - {source}

        told = await rig.client.post("/admin/move", json={"replica": source, "to": target})
        unknown = await rig.client.post("/admin/move", json={"replica": source, "to": "nobody"})
        same = await rig.client.post("/admin/move", json={"replica": source, "to": source})
        prefill = await rig.client.post("/admin/move", json={"replica": source, "to": "prefill-0"})
        none = await rig.client.post("/admin/move", json={"replica": source, "num_streams": 0})
        let_go(rig)
        await asyncio.gather(*answers)

        assert told.json() == {"replica": source, "to": target, "num_streams": 1}
        assert unknown.status_code == 404
        assert "nobody" in unknown.json()["error"]["message"]
        assert unknown.json()["error"]["param"] == "to"
        assert (same.status_code, same.json()["error"]["code"]) == (400, "same_replica")
        assert (prefill.status_code, prefill.json()["error"]["code"]) == (400, "wrong_role")
        assert none.status_code == 400
        text = (await rig.client.get("/metrics")).text
        assert 'baton:rebalance_moves_total{reason="order"' in text
        assert (await rig.client.get("/status")).json()["totals"]["ordered_moves"] == 1


async def order_is_late(rig: RouterRig) -> None:
    """A waiting prompt was ordered to leave, and its worker makes such a long step that the router waits no longer."""
    streams = rig.service.rebalancer._streams
    await until(lambda: any(item.prompt is not None and item.order is not None for item in streams.all()))
    await until(lambda: all(item.prompt is None and item.order is None for item in streams.all()))


@pytest.mark.parametrize("is_late", [False, True])
async def test_prompt_that_waits_goes_by_itself_to_a_worker_that_has_nothing_to_do(
    model_dir: Path, is_late: bool
) -> None:
    expected = await undisturbed(model_dir, 1)
    settings = replace(FAST, roles="elastic", decode_policy="queued_tokens", local_prefill_tokens=1000)
    async with router_rig(model_dir, num_decode=2, settings=settings) as rig:
        rig.decode[1].refuse_code = "draining"
        await rig.service._refresh(wait=True)
        hold(rig)
        (answer,) = texts(rig, 1)
        await all_at(rig, 0, 1)

        if is_late:
            rig.decode[0].order_gate.clear()
        rig.decode[0].gauges = {"step_time": KNOWN, "queued_prefill_tokens": 50_000}
        rig.decode[1].gauges = {"step_time": KNOWN}
        rig.decode[1].refuse_code = None
        if is_late:
            await order_is_late(rig)
            rig.decode[0].order_gate.set()
        await all_at(rig, 1, 1)
        let_go(rig)

        assert [await answer] == expected
        counters = rig.service.counters
        assert (counters.num_queue_moves, counters.num_ordered_moves, counters.num_migrations) == (1, 0, 0)
        assert counters.num_drain_moves == 0
        assert (await rig.client.get("/status")).json()["totals"]["queue_moves"] == 1
        await until(rig.is_at_rest)


@pytest.mark.parametrize("is_late", [False, True])
async def test_prompt_that_waits_to_be_handed_over_goes_to_another_worker_as_well(
    model_dir: Path, is_late: bool
) -> None:
    expected = await undisturbed(model_dir, 1)
    settings = replace(FAST, roles="elastic", decode_policy="queued_tokens")
    async with router_rig(model_dir, num_prefill=2, num_decode=1, settings=settings) as rig:
        for name in ("prefill-0", "prefill-1"):
            rig.prefill.replicas[name].gate.clear()
        rig.prefill[1].refuse_code = "draining"
        await rig.service._refresh(wait=True)
        (answer,) = texts(rig, 1)
        await until(lambda: len(rig.prefill[0].running) == 1)

        if is_late:
            rig.prefill[0].order_gate.clear()
        rig.prefill[0].gauges = {"step_time": KNOWN, "queued_prefill_tokens": 50_000}
        rig.prefill[1].gauges = rig.decode[0].gauges = {"step_time": KNOWN}
        rig.prefill[1].refuse_code = None
        if is_late:
            await order_is_late(rig)
            rig.prefill[0].order_gate.set()
        await until(lambda: len(rig.prefill[1].running) == 1)
        for name in ("prefill-0", "prefill-1"):
            rig.prefill.replicas[name].gate.set()

        assert [await answer] == expected
        counters = rig.service.counters
        assert (counters.num_queue_moves, counters.num_prefill_retries, counters.num_local_prefills) == (1, 0, 0)
        await until(rig.is_at_rest)


async def test_prompt_that_prefill_gives_back_without_an_order_is_computed_by_another_prefill_worker(
    model_dir: Path,
) -> None:
    expected = await undisturbed(model_dir, 1)
    async with router_rig(model_dir, num_prefill=2, num_decode=1) as rig:
        for name in ("prefill-0", "prefill-1"):
            rig.prefill.replicas[name].gate.clear()
        rig.prefill[1].refuse_code = "draining"
        await rig.service._refresh(wait=True)
        (answer,) = texts(rig, 1)
        await until(lambda: len(rig.prefill[0].running) == 1)
        rig.prefill[1].refuse_code = None
        await until(lambda: all(item.takes_requests for item in rig.service.prefill_pool.replicas))

        await rig.prefill.move_out("prefill-0", list(rig.prefill[0].running), only_waiting=True)
        await until(lambda: len(rig.prefill[1].running) == 1)
        for name in ("prefill-0", "prefill-1"):
            rig.prefill.replicas[name].gate.set()

        assert [await answer] == expected
        assert rig.service.counters.num_local_prefills == 0
        await until(rig.is_at_rest)
