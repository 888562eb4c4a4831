"""Replicas that leave and return: what an accepted request waits for, and what it tries meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from router.settings import RouterSettings
from tests.support.router.fake_replica import FakeReplica
from tests.support.router.fake_workers import counting
from tests.support.router.router_rig import FAST, RouterRig, router_rig, until

PROMPT = [5, 6, 7]
NUM_TOKENS = 40
ASK = {"max_tokens": NUM_TOKENS, "seed": 1, "return_token_ids": True, "ignore_eos": True}


def expected_tokens(rig: RouterRig) -> list[int]:
    return [counting(rig.prefill[0].seen[0], position) for position in range(NUM_TOKENS)]


def with_settings(**changes: object) -> RouterSettings:
    return dataclasses.replace(FAST, **changes)  # type: ignore[arg-type]


def _is_in_service(rig: RouterRig, replica_id: str) -> bool:
    replica = rig.service.decode_pool.get(replica_id)
    return replica is not None and replica.takes_requests


def begin_drain_unnoticed(replica: FakeReplica) -> None:
    """From now on it refuses, and its reports do not say so yet."""
    replica.gate.clear()
    replica.status_gate.clear()
    replica.refuse_code = "draining"


async def test_lone_decode_replica_with_many_streams_is_asked_again_as_soon_as_with_one(model_dir: Path) -> None:
    settings = with_settings(backoff_max_s=RouterSettings().backoff_max_s)
    async with router_rig(model_dir, settings=settings) as rig:
        rig.decode[0].step_gate.clear()
        answers = [asyncio.create_task(rig.complete([5, number], **ASK)) for number in range(12)]
        await until(lambda: len(rig.decode[0].running) == 12)
        rig.decode.kill("decode-0")
        await until(lambda: not rig.service.decode_pool.has_any())
        rig.decode[0].step_gate.set()
        rig.decode.revive("decode-0")

        assert [(await answer).status_code for answer in answers] == [200] * 12


async def test_accepted_request_waits_for_a_decode_replica_that_goes_before_its_turn(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        rig.prefill[0].gate.clear()
        answer = asyncio.create_task(rig.complete(PROMPT, **ASK))
        await until(lambda: bool(rig.prefill[0].running))
        rig.decode.kill("decode-0")
        await until(lambda: not rig.service.decode_pool.has_any())
        rig.prefill[0].gate.set()
        await until(lambda: bool(rig.prefill[0].leases))
        rig.decode.revive("decode-0")

        assert (await answer).json()["choices"][0]["token_ids"] == expected_tokens(rig)


async def test_accepted_request_that_needs_no_decode_replica_waits_for_one_when_prefill_is_lost(
    model_dir: Path,
) -> None:
    settings = with_settings(backoff_min_s=0.1)
    async with router_rig(model_dir, settings=settings) as rig:
        rig.prefill[0].gate.clear()
        answer = asyncio.create_task(rig.complete(PROMPT, **ASK | {"max_tokens": 1}))
        await until(lambda: bool(rig.prefill[0].running))
        rig.decode.kill("decode-0")
        await until(lambda: not rig.service.decode_pool.has_any())
        rig.prefill.kill("prefill-0")
        await until(lambda: not rig.service.prefill_pool.has_any())
        rig.decode.revive("decode-0")

        assert (await answer).json()["choices"][0]["token_ids"] == expected_tokens(rig)[:1]


def test_accepted_request_waits_longer_by_default_than_a_new_worker_takes_to_start() -> None:
    longest_start_s = 56.0  # docs/faults.md, "whole again after"

    assert RouterSettings().recovery_wait_s >= 2 * longest_start_s


async def test_prompt_that_drained_prefill_replicas_refuse_is_computed_by_decode(model_dir: Path) -> None:
    async with router_rig(model_dir, num_prefill=4) as rig:
        await until(lambda: all(map(rig.prefill.has_stream, rig.prefill.replicas)))
        for replica in rig.prefill.replicas.values():
            begin_drain_unnoticed(replica)
        body = (await rig.complete(PROMPT, **ASK)).json()

        assert body["choices"][0]["token_ids"] == expected_tokens(rig)
        assert rig.service.counters.num_local_prefills == 1
        assert [len(replica.seen) for replica in rig.prefill.replicas.values()] == [1, 1, 1, 1]


async def test_refusals_by_drained_prefill_replicas_are_no_attempts(model_dir: Path) -> None:
    settings = with_settings(prefill_lost_policy="fail")
    async with router_rig(model_dir, num_prefill=2, settings=settings) as rig:
        await until(lambda: rig.prefill.has_stream("prefill-0"))
        begin_drain_unnoticed(rig.prefill[0])
        body = (await rig.complete(PROMPT, **ASK)).json()

        assert body["choices"][0]["token_ids"] == expected_tokens(rig)


async def test_replica_that_left_after_it_was_chosen_is_no_loss(model_dir: Path) -> None:
    """As in an update, in which Serve stops sending requests before the worker reports that it drains."""
    settings = with_settings(migration_limit=0, prefill_lost_policy="fail")
    async with router_rig(model_dir, num_prefill=2, num_decode=2, settings=settings) as rig:
        leaving = (rig.prefill[0], rig.decode[0])
        await until(lambda: rig.prefill.has_stream("prefill-0") and rig.decode.has_stream("decode-0"))
        for replica in leaving:
            replica.has_left = True
        body = (await rig.complete(PROMPT, **ASK)).json()

        request = rig.prefill[1].seen[0]
        assert body["choices"][0]["token_ids"] == [counting(request, position) for position in range(NUM_TOKENS)]
        assert rig.service.counters.num_migrations == 0
        assert [len(replica.seen) for replica in leaving] == [0, 0]


async def test_router_that_has_just_started_hears_all_replicas_that_are_there(model_dir: Path) -> None:
    async with router_rig(model_dir, num_prefill=3, num_decode=3) as rig:
        pools = (rig.service.prefill_pool, rig.service.decode_pool)

        assert [len(pool.candidates()) for pool in pools] == [3, 3]
        assert all(replica.has_stream for pool in pools for replica in pool.replicas)


async def test_new_replica_whose_stream_does_not_begin_keeps_no_request_waiting(model_dir: Path) -> None:
    settings = with_settings(connect_timeout_s=600.0, stream_silence_timeout_s=600.0)
    async with router_rig(model_dir, settings=settings) as rig:
        await until(lambda: rig.decode.has_stream("decode-0"))
        rig.decode.add("decode-new").stream_gate.clear()
        await until(lambda: len(rig.service.decode_pool.candidates()) == 1 and _is_in_service(rig, "decode-new"))
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(rig.complete([5, number], **ASK) for number in range(8)))
        assert [answer.status_code for answer in answers] == [200] * 8
        assert not rig.decode.replicas["decode-new"].seen

        rig.decode.replicas["decode-new"].stream_gate.set()
        await until(lambda: len(rig.service.decode_pool.candidates()) == 2)


async def test_request_that_cannot_be_brought_to_a_replica_is_not_counted_as_gone_on_elsewhere(model_dir: Path) -> None:
    settings = with_settings(connect_timeout_s=0.2, backoff_min_s=5.0, backoff_max_s=5.0)
    async with router_rig(model_dir, settings=settings) as rig:
        rig.decode[0].stream_gate.clear()
        rig.decode.kill("decode-0")
        await until(lambda: not rig.service.decode_pool.has_any())
        rig.decode.revive("decode-0")
        await until(rig.service.decode_pool.has_any)
        answer = asyncio.create_task(rig.complete(PROMPT, **ASK))
        await until(lambda: not rig.service.decode_pool.has_any())
        rig.decode.add("decode-1")

        assert (await answer).json()["choices"][0]["token_ids"] == expected_tokens(rig)
        assert rig.service.counters.num_migrations == 0
        assert not rig.decode[0].seen


async def test_request_that_the_only_decode_replica_refuses_when_drained_waits_for_its_successor(
    model_dir: Path,
) -> None:
    async with router_rig(model_dir) as rig:
        rig.prefill[0].gate.clear()
        answer = asyncio.create_task(rig.complete(PROMPT, **ASK))
        await until(lambda: bool(rig.prefill[0].running) and rig.decode.has_stream("decode-0"))
        begin_drain_unnoticed(rig.decode[0])
        rig.prefill[0].gate.set()
        await until(lambda: bool(rig.decode[0].seen))
        rig.decode.hidden.add("decode-0")
        rig.decode.add("decode-1")

        assert (await answer).json()["choices"][0]["token_ids"] == expected_tokens(rig)
        assert len(rig.decode[0].seen) == 1


async def test_replicas_lost_before_the_kv_was_count_after_it(model_dir: Path) -> None:
    settings = with_settings(migration_limit=1, kv_lost_policy="retry")
    async with router_rig(model_dir, num_decode=3, settings=settings) as rig:
        rig.decode[0].gate.clear()
        rig.decode[1].lost_loads = 1
        rig.decode[2].die_after_tokens = 5
        answer = asyncio.create_task(rig.complete(PROMPT, **ASK))
        await until(lambda: bool(rig.decode[0].running))
        rig.decode.kill("decode-0")
        error = (await answer).json()["error"]

        assert error["code"] == "decode_failed"
        assert "on 2 replicas" in error["message"]
        assert [len(replica.seen) for replica in rig.decode.replicas.values()] == [1, 1, 1]


async def test_request_that_ends_at_once_is_not_counted_as_moved(model_dir: Path) -> None:
    settings = with_settings(decode_lost_policy="fail")
    async with router_rig(model_dir, num_decode=2, settings=settings) as rig:
        rig.decode[0].die_after_tokens = 10
        response = await rig.complete(PROMPT, **ASK)

        assert response.json()["error"]["code"] == "decode_failed"
        assert rig.service.counters.num_migrations == 0


async def test_error_tells_of_the_last_replica_and_not_of_one_that_was_full_before(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=2, settings=with_settings(migration_limit=0)) as rig:
        rig.decode[0].refuse_code = "queue_full"
        rig.decode[1].die_after_tokens = 5
        response = await rig.complete(PROMPT, **ASK)

        assert (response.status_code, response.json()["error"]["code"]) == (502, "decode_failed")


@pytest.mark.parametrize("code", ["queue_full", "duplicate_request", "engine_dead"])
async def test_lone_decode_replica_that_refused_is_not_asked_again_at_once(model_dir: Path, code: str) -> None:
    settings = with_settings(backoff_min_s=60.0, backoff_max_s=60.0)
    async with router_rig(model_dir, settings=settings) as rig:
        rig.decode[0].refuse_code = code
        answer = asyncio.create_task(rig.complete(PROMPT, **ASK))
        await until(lambda: bool(rig.decode[0].seen))
        await rig.complete(PROMPT, max_tokens=1)

        assert len(rig.decode[0].seen) == 1
        answer.cancel()


@pytest.mark.parametrize("next_is_lost", [False, True])
async def test_room_on_a_decode_replica_that_was_lost_before_the_turn_is_given_back(
    model_dir: Path, next_is_lost: bool
) -> None:
    async with router_rig(model_dir, num_decode=2) as rig:
        rig.prefill[0].gate.clear()
        rig.decode[1].step_gate.clear()
        answer = asyncio.create_task(rig.complete(PROMPT, **ASK))
        await until(lambda: bool(rig.prefill[0].running))
        first = rig.service.decode_pool.get("decode-0")
        assert first is not None
        assert first.num_reserved == 1
        rig.decode.kill("decode-0")
        await until(lambda: first.is_left_out)
        if next_is_lost:
            rig.prefill.kill("prefill-0")
        rig.prefill[0].gate.set()
        await until(lambda: bool(rig.decode[1].running))
        rig.decode.revive("decode-0")
        await until(lambda: first.takes_requests)

        assert (first.num_reserved, first.reserved_blocks) == (0, 0)
        rig.decode[1].step_gate.set()
        assert (await answer).status_code == 200
