"""Workers that die, hang, refuse and fail: the answer stays the same or ends with one clear error, and nothing
is left.
"""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial
from pathlib import Path

import pytest

from engine.contract.messages import SamplingParams
from engine.contract.token_ids import TokenIds
from router.request.text_request import TextRequest
from router.settings import RouterSettings
from tests.support.loop_time import LoopTime
from tests.support.router.fake_replica import FakeReplica
from tests.support.router.fake_workers import counting
from tests.support.router.router_rig import FAST, RouterRig, events, router_rig, until

PROMPT = [5, 6, 7]
NUM_TOKENS = 40
ASK = {"max_tokens": NUM_TOKENS, "seed": 1, "return_token_ids": True, "ignore_eos": True}


def expected_tokens(rig: RouterRig) -> list[int]:
    return [counting(rig.prefill[0].seen[0], position) for position in range(NUM_TOKENS)]


def is_idle(replica: FakeReplica) -> bool:
    return not replica.running


def has_produced(replica: FakeReplica, num_tokens: int) -> bool:
    return replica.num_tokens > num_tokens


def with_settings(**changes: object) -> RouterSettings:
    return dataclasses.replace(FAST, **changes)  # type: ignore[arg-type]


async def test_prefill_that_is_dead_is_replaced_by_another(model_dir: Path) -> None:
    async with router_rig(model_dir, num_prefill=2) as rig:
        await until(lambda: rig.prefill.has_stream("prefill-0"))
        rig.prefill[0].is_dead = True
        body = (await rig.complete(PROMPT, **ASK)).json()

        request = rig.prefill[1].seen[0]
        assert body["choices"][0]["token_ids"] == [counting(request, position) for position in range(NUM_TOKENS)]
        assert rig.service.counters.num_prefill_retries == 1
        assert rig.is_at_rest()


async def test_prefill_that_dies_while_it_computes_is_replaced_under_the_same_id(model_dir: Path) -> None:
    async with router_rig(model_dir, num_prefill=2) as rig:
        rig.prefill[0].gate.clear()
        answer = asyncio.create_task(rig.complete(PROMPT, **ASK))
        await until(lambda: bool(rig.prefill[0].running))
        rig.prefill[0].is_dead = True
        rig.prefill[0].gate.set()

        assert (await answer).json()["choices"][0]["token_ids"] == expected_tokens(rig)
        assert rig.prefill[0].seen[0].request_id == rig.prefill[1].seen[0].request_id


async def test_prefill_that_hangs_is_given_up_and_aborted(model_dir: Path) -> None:
    async with router_rig(model_dir, num_prefill=2, settings=with_settings(prefill_timeout_s=30.0)) as rig:
        time = LoopTime()
        rig.prefill[0].gate.clear()
        answer = asyncio.create_task(rig.complete(PROMPT, **ASK))
        await until(lambda: bool(rig.prefill[0].running))
        time.advance(30.0)
        body = (await answer).json()

        assert body["choices"][0]["token_ids"] == expected_tokens(rig)
        await until(lambda: rig.prefill[0].aborted == [rig.prefill[0].seen[0].request_id])
        rig.prefill[0].gate.set()
        await until(rig.is_at_rest)


async def test_prefill_that_stops_answering_anything_is_given_up_long_before_its_timeout(model_dir: Path) -> None:
    settings = with_settings(prefill_timeout_s=300.0, status_timeout_s=0.05, unresponsive_after_s=0.1)
    async with router_rig(model_dir, num_prefill=2, settings=settings) as rig:
        rig.prefill[0].gate.clear()
        rig.prefill[0].status_gate.clear()
        body = (await rig.complete(PROMPT, **ASK)).json()

        assert body["choices"][0]["token_ids"] == expected_tokens(rig)
        rig.prefill[0].gate.set()
        rig.prefill[0].status_gate.set()
        await until(rig.is_at_rest)


async def test_prefill_that_keeps_failing_ends_in_one_error(model_dir: Path) -> None:
    async with router_rig(model_dir, num_prefill=4) as rig:
        for replica in rig.prefill.replicas.values():
            replica.gate.clear()
        answer = asyncio.create_task(rig.complete(PROMPT, **ASK))
        for _ in range(3):
            await until(lambda: any(item.running for item in rig.prefill.replicas.values()))
            replica = next(item for item in rig.prefill.replicas.values() if item.running)
            replica.is_dead = True
            replica.gate.set()
            await until(partial(is_idle, replica))

        response = await answer
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (502, "prefill_failed")
        assert "3 times" in error["message"]


async def test_decode_that_is_dead_before_its_first_token_is_replaced(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=2) as rig:
        rig.decode.kill("decode-0")
        body = (await rig.complete(PROMPT, **ASK)).json()

        assert body["choices"][0]["token_ids"] == expected_tokens(rig)
        assert rig.is_at_rest()


async def test_decode_that_dies_mid_stream_is_continued_elsewhere_without_a_gap(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=2) as rig:
        rig.decode[0].die_after_tokens = 10
        chunks = events(await rig.complete(PROMPT, stream=True, **ASK))

        ids = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", [])]
        moved = rig.decode[1].seen[0]
        assert ids == expected_tokens(rig)
        assert len(moved.output_token_ids) == 11
        assert moved.kv_transfer is None
        assert rig.service.counters.num_migrations == 1


async def test_decode_lost_before_reading_hands_the_transfer_to_the_next_one(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=2) as rig:
        rig.decode[0].gate.clear()
        answer = asyncio.create_task(rig.complete(PROMPT, **ASK))
        await until(lambda: bool(rig.decode[0].running))
        rig.decode.kill("decode-0")

        assert (await answer).json()["choices"][0]["token_ids"] == expected_tokens(rig)
        assert rig.decode[1].seen[0].kv_transfer == rig.decode[0].seen[0].kv_transfer
        await until(lambda: rig.prefill[0].aborted == [rig.prefill[0].seen[0].request_id])


@pytest.mark.known_failure(13)
async def test_decode_that_dies_again_and_again_ends_in_an_error_event(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=3, settings=with_settings(migration_limit=2)) as rig:
        for replica in rig.decode.replicas.values():
            replica.die_after_tokens = 5
        response = await rig.complete(PROMPT, stream=True, **ASK)

        assert response.status_code == 200
        chunks = events(response)
        assert chunks[-1]["error"]["code"] == "decode_failed"
        assert rig.service.counters.num_failed == 1


async def test_only_decode_replica_that_comes_back_goes_on_with_the_request(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        rig.decode[0].die_after_tokens = 10
        answer = asyncio.create_task(rig.complete(PROMPT, **ASK))
        await until(lambda: rig.decode[0].is_dead)
        rig.decode.revive("decode-0")

        assert (await answer).json()["choices"][0]["token_ids"] == expected_tokens(rig)


async def test_silent_decode_replica_counts_as_lost(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=2, settings=with_settings(stream_silence_timeout_s=0.1)) as rig:
        rig.decode[0].gate.clear()
        body = (await rig.complete(PROMPT, **ASK)).json()

        assert body["choices"][0]["token_ids"] == expected_tokens(rig)
        assert rig.prefill[0].seen[0].request_id in rig.decode[0].aborted


async def test_decode_that_accepts_nothing_any_more_is_given_up_with_its_stream(model_dir: Path) -> None:
    settings = with_settings(stream_silence_timeout_s=0.1, submit_timeout_s=300.0)
    async with router_rig(model_dir, num_decode=2, settings=settings) as rig:
        rig.decode[0].submit_gate.clear()
        body = (await rig.complete(PROMPT, **ASK)).json()

        assert body["choices"][0]["token_ids"] == expected_tokens(rig)
        rig.decode[0].submit_gate.set()
        await until(rig.is_at_rest)


async def test_decode_whose_engine_hangs_counts_as_lost_though_it_reports(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=2) as rig:
        rig.decode[0].step_gate.clear()
        answer = asyncio.create_task(rig.complete(PROMPT, **ASK))
        await until(lambda: bool(rig.decode[0].running))
        rig.decode[0].is_stalled = True

        assert (await answer).json()["choices"][0]["token_ids"] == expected_tokens(rig)


async def test_without_moves_a_lost_decode_worker_is_the_callers_error_at_once(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=2, settings=with_settings(migration_limit=0)) as rig:
        rig.decode[0].die_after_tokens = 10
        chunks = events(await rig.complete(PROMPT, stream=True, **ASK))

        assert chunks[-1]["error"]["code"] == "decode_failed"
        assert rig.decode[1].seen == []
        await until(rig.is_at_rest)


@pytest.mark.known_failure(13)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_error_of_the_engine_is_the_callers_error(model_dir: Path, role: str) -> None:
    async with router_rig(model_dir, num_prefill=2, num_decode=2) as rig:
        pool = rig.prefill if role == "prefill" else rig.decode
        for replica in pool.replicas.values():
            replica.error_code = "kv_load_failed"
        response = await rig.complete(PROMPT, stream=False, **ASK)

        assert (response.status_code, response.json()["error"]["code"]) == (502, "kv_load_failed")
        await until(rig.is_at_rest)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_request_of_an_engine_that_ended_is_done_by_another(model_dir: Path, role: str) -> None:
    async with router_rig(model_dir, num_prefill=2, num_decode=2) as rig:
        pool = rig.prefill if role == "prefill" else rig.decode
        pool[0].error_code = "engine_dead"
        body = (await rig.complete(PROMPT, **ASK)).json()

        assert body["choices"][0]["token_ids"] == expected_tokens(rig)


@pytest.mark.known_failure(3)
async def test_refusal_by_decode_ends_the_lease(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        rig.decode[0].refuse_code = "no_connector"
        response = await rig.complete(PROMPT, **ASK)

        assert (response.status_code, response.json()["error"]["code"]) == (502, "no_connector")
        await until(rig.is_at_rest)


@pytest.mark.known_failure(14)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_deadline_ends_a_request_that_hangs_and_frees_it_everywhere(model_dir: Path, role: str) -> None:
    async with router_rig(model_dir) as rig:
        time = LoopTime()
        replica = (rig.prefill if role == "prefill" else rig.decode)[0]
        replica.gate.clear()
        asking = asyncio.create_task(
            rig.client.post("/v1/completions", json={"prompt": PROMPT, **ASK}, headers={"X-Request-Timeout": "30"})
        )
        await until(lambda: bool(replica.running))
        time.advance(30.0)
        response = await asking

        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (504, "deadline_exceeded")
        assert role in error["message"]
        await until(lambda: replica.seen[0].request_id in replica.aborted)
        replica.gate.set()
        await until(rig.is_at_rest)


async def test_too_many_requests_in_progress_are_refused_at_the_door(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=with_settings(max_num_requests=2)) as rig:
        rig.prefill[0].gate.clear()
        answers = [asyncio.create_task(rig.complete(PROMPT, **ASK)) for _ in range(2)]
        await until(lambda: rig.service.num_alive == 2)
        refused = await rig.complete(PROMPT, **ASK)
        rig.prefill[0].gate.set()

        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert [(await answer).status_code for answer in answers] == [200, 200]


async def test_first_token_that_overtakes_the_answer_keeps_its_lease(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        rig.prefill[0].answer_gate.clear()
        body = (await rig.complete(PROMPT, **ASK)).json()
        rig.prefill[0].answer_gate.set()
        await until(rig.is_at_rest)

        assert body["choices"][0]["token_ids"] == expected_tokens(rig)
        assert rig.prefill[0].aborted == []


async def test_request_given_up_in_the_very_moment_of_its_hand_over_leaves_no_lease(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        replica = rig.prefill[0]
        output = rig.service.generate(
            TextRequest(request_id="a", prompt_token_ids=TokenIds.of((5, 6)), sampling=SamplingParams(max_tokens=9))
        )
        while not replica.leases:  # noqa: ASYNC110 (until the answer is there, and nobody has looked at it)
            await asyncio.sleep(0)
        output.cancel()

        await until(rig.is_at_rest)
        assert rig.decode[0].seen == []


async def test_closing_the_router_ends_everything_it_has_running(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        rig.decode[0].gate.clear()
        answer = asyncio.create_task(rig.complete(PROMPT, **ASK))
        await until(lambda: bool(rig.decode[0].running))
        await rig.service.close()

        assert (await answer).status_code == 503
        assert rig.is_at_rest()


@pytest.mark.parametrize(("num_prompt_tokens", "is_local"), [(8, True), (9, False)])
async def test_short_prompts_skip_prefill_where_that_is_asked_for(
    model_dir: Path, num_prompt_tokens: int, is_local: bool
) -> None:
    async with router_rig(model_dir, settings=with_settings(local_prefill_tokens=8)) as rig:
        body = (await rig.complete([5] * num_prompt_tokens, **ASK)).json()

        request = rig.decode[0].seen[0]
        assert body["choices"][0]["token_ids"] == [counting(request, position) for position in range(NUM_TOKENS)]
        assert (rig.prefill[0].seen == []) is is_local
        assert (request.kv_transfer is None) is is_local
        assert rig.is_at_rest()


async def test_many_requests_survive_a_storm_of_deaths(model_dir: Path) -> None:
    async with router_rig(model_dir, num_prefill=3, num_decode=3, settings=with_settings(migration_limit=8)) as rig:
        answers = [asyncio.create_task(rig.complete([5, number], **ASK)) for number in range(40)]
        for round_number in range(3):
            name = f"decode-{round_number}"
            await until(partial(has_produced, rig.decode.replicas[name], 50))
            rig.decode.kill(name)
            await asyncio.sleep(0)
            rig.decode.revive(name)
        bodies = [(await answer).json() for answer in answers]

        by_prompt = {request.prompt_token_ids: request for request in rig.prefill[0].seen}
        for replica in rig.prefill.replicas.values():
            by_prompt.update({request.prompt_token_ids: request for request in replica.seen})
        for number, body in enumerate(bodies):
            request = by_prompt[5, number]
            assert body["choices"][0]["token_ids"] == [counting(request, place) for place in range(NUM_TOKENS)]
        await until(rig.is_at_rest)
