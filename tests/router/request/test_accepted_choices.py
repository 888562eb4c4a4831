"""All choices of a body are counted on arrival: accepted ones wait for room, and are never refused later."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.contract.messages import SamplingParams
from engine.contract.token_ids import TokenIds
from router.errors import QueueFullError
from router.request.text_request import TextRequest
from router.security import SecuritySettings, hash_key, new_key
from router.settings import RouterSettings
from router.trace.origin import Origin
from tests.support.loop_time import LoopTime
from tests.support.router.fake_workers import counting
from tests.support.router.router_rig import FAST, RouterRig, completion_text, events, router_rig, until

PROMPT = [5, 6, 7]
NUM_TOKENS = 40
ASK = {"max_tokens": NUM_TOKENS, "seed": 1, "return_token_ids": True, "ignore_eos": True}
BLOCKS_A_CHOICE = 3
"""Blocks of 16 tokens, for the prompt and its answer."""


def with_settings(**changes: Any) -> RouterSettings:
    return dataclasses.replace(FAST, **changes)


async def has_blocks(rig: RouterRig, num_blocks: int) -> None:
    """Make the decode replicas so large."""
    for replica in rig.decode.replicas.values():
        replica.num_blocks = num_blocks
    pool = rig.service.decode_pool
    await until(lambda: all(item.load.num_blocks == num_blocks for item in pool.replicas))


def streamed_tokens(response: httpx.Response, index: int) -> list[int]:
    """The token ids of one choice of a stream that has no error in it."""
    chunks = events(response)
    assert not [chunk["error"] for chunk in chunks if "error" in chunk]
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return [token for choice in choices for token in choice.get("token_ids", [])]


def tokens_of_choice(rig: RouterRig, index: int) -> list[int]:
    request = rig.prefill[0].seen[0]
    sampling = dataclasses.replace(request.sampling, seed=1 + index)
    own = dataclasses.replace(request, sampling=sampling)
    return [counting(own, position) for position in range(NUM_TOKENS)]


@pytest.mark.known_failure(37)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_room_of_all_choices_is_taken_when_they_come(model_dir: Path, is_stream: bool) -> None:
    async with router_rig(model_dir, settings=with_settings(max_num_queued=0)) as rig:
        await has_blocks(rig, 2 * BLOCKS_A_CHOICE)
        rig.prefill[0].gate.clear()
        answer = asyncio.create_task(rig.complete(PROMPT, **ASK, n=2, stream=is_stream))
        await until(lambda: bool(rig.prefill[0].running))
        late = asyncio.create_task(rig.complete(PROMPT, **ASK))
        await until(lambda: late.done() or len(rig.prefill[0].running) == 2)
        rig.prefill[0].gate.set()

        response = await answer
        assert response.status_code == 200, response.text
        if is_stream:
            assert [streamed_tokens(response, index) for index in range(2)] == [
                tokens_of_choice(rig, index) for index in range(2)
            ]
        assert (await late).status_code == 429
        await until(rig.is_at_rest)


@pytest.mark.known_failure(37)
@pytest.mark.parametrize(
    ("body", "num_choices"),
    [({"n": 4}, 4), ({"best_of": 4}, 4), ({"prompt": [[5], [6], [7], [8]]}, 4), ({"prompt": [[5], [6]], "n": 2}, 4)],
)
async def test_body_with_a_choice_too_many_is_refused_as_a_whole(
    model_dir: Path, body: dict[str, Any], num_choices: int
) -> None:
    async with router_rig(model_dir, settings=with_settings(max_num_queued=num_choices - 2)) as rig:
        await has_blocks(rig, BLOCKS_A_CHOICE)
        ask = {"prompt": PROMPT, **ASK, **body}
        refused = await rig.client.post("/v1/completions", json=ask)

        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert f"{num_choices} choices" in refused.json()["error"]["message"]
        assert rig.prefill[0].seen == []
        assert (rig.service.counters.num_refused, rig.service.counters.num_requests) == (num_choices, 0)
        assert rig.is_at_rest()


@pytest.mark.known_failure(37)
async def test_body_whose_choices_find_room_or_a_place_in_the_queue_is_served(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=with_settings(max_num_queued=3)) as rig:
        await has_blocks(rig, BLOCKS_A_CHOICE)
        response = await rig.complete(PROMPT, **ASK, n=4, stream=True)

        assert [streamed_tokens(response, index) for index in range(4)] == [
            tokens_of_choice(rig, index) for index in range(4)
        ]
        assert rig.service.num_waiting == 0
        await until(rig.is_at_rest)


@pytest.mark.known_failure(37)
async def test_places_of_choices_that_have_not_asked_yet_are_taken(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=with_settings(max_num_queued=2)) as rig:
        await has_blocks(rig, BLOCKS_A_CHOICE)
        rig.prefill[0].gate.clear()
        answer = asyncio.create_task(rig.complete(PROMPT, **ASK, n=3, stream=True))
        await until(lambda: bool(rig.prefill[0].running))
        refused = await rig.complete([9], **ASK)
        assert refused.status_code == 429
        assert rig.service.num_waiting == 0, "they wait for the first choice, not for room"
        rig.prefill[0].gate.set()

        assert [streamed_tokens(await answer, index) for index in range(3)] == [
            tokens_of_choice(rig, index) for index in range(3)
        ]
        await until(rig.is_at_rest)
        assert (await rig.complete([9], **ASK)).status_code == 200


@pytest.mark.known_failure(37)
async def test_of_many_bodies_each_is_served_or_refused_before_it_begins(model_dir: Path) -> None:
    draw = random.Random(5)
    outcomes: Counter[str] = Counter()

    async def ask(rig: RouterRig) -> None:
        body: dict[str, Any] = {"max_tokens": draw.randrange(1, 60), "ignore_eos": True, "stream": True}
        prompts = [[draw.randrange(300) for _ in range(draw.randrange(1, 50))] for _ in range(draw.randrange(1, 3))]
        response = await rig.client.post("/v1/completions", json={"prompt": prompts, "n": draw.randrange(1, 5), **body})
        if response.status_code == 200:
            chunks = events(response)
            outcomes[chunks[-1]["error"]["code"] if "error" in chunks[-1] else "served"] += 1
        else:
            outcomes[f"{response.status_code} {response.json()['error']['code']}"] += 1

    async with router_rig(model_dir, num_decode=2, settings=with_settings(max_num_queued=6)) as rig:
        await has_blocks(rig, 16)
        for _ in range(11):
            await asyncio.gather(*(ask(rig) for _ in range(10)))
        await until(rig.is_at_rest)

    assert set(outcomes) == {"served", "429 queue_full"}, outcomes
    assert sum(outcomes.values()) == 110


@pytest.mark.known_failure(37)
async def test_choices_wait_for_a_decode_replica_that_went_before_their_turn(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        rig.prefill[0].gate.clear()
        answer = asyncio.create_task(rig.complete(PROMPT, **ASK, n=3, stream=True))
        await until(lambda: bool(rig.prefill[0].running))
        rig.decode.kill("decode-0")
        await until(lambda: not rig.service.decode_pool.has_any())
        rig.prefill[0].gate.set()
        await until(lambda: bool(rig.prefill[0].leases))
        rig.decode.revive("decode-0")

        assert [streamed_tokens(await answer, index) for index in range(3)] == [
            tokens_of_choice(rig, index) for index in range(3)
        ]
        await until(rig.is_at_rest)


async def test_accepted_request_waits_for_a_prefill_replica_that_went_before_its_turn(model_dir: Path) -> None:
    settings = with_settings(prefill_lost_policy="fail")
    async with router_rig(model_dir, settings=settings) as rig:
        await has_blocks(rig, BLOCKS_A_CHOICE)
        rig.decode[0].step_gate.clear()
        first = asyncio.create_task(rig.complete(PROMPT, **ASK))
        await until(lambda: bool(rig.decode[0].running))
        second = asyncio.create_task(rig.complete(PROMPT, **ASK))
        await until(lambda: rig.service.num_waiting == 1)
        rig.prefill.kill("prefill-0")
        await until(lambda: not rig.service.prefill_pool.has_any())
        rig.decode[0].step_gate.set()
        assert (await first).status_code == 200
        await until(lambda: rig.service.num_waiting == 0)
        rig.prefill.revive("prefill-0")

        response = await second
        assert response.json()["choices"][0]["token_ids"] == tokens_of_choice(rig, 0), response.text


@pytest.mark.known_failure(37)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_accepted_choices_wait_for_workers_whose_queues_are_full(model_dir: Path, role: str) -> None:
    async with router_rig(model_dir, num_prefill=2, num_decode=2) as rig:
        replicas = list((rig.prefill if role == "prefill" else rig.decode).replicas.values())
        for replica in replicas:
            replica.refuse_code = "queue_full"
        answer = asyncio.create_task(rig.complete(PROMPT, **ASK, n=2, stream=True))
        await until(lambda: sum(len(replica.seen) for replica in replicas) >= 12)
        assert not answer.done()
        for replica in replicas:
            replica.refuse_code = None

        assert [streamed_tokens(await answer, index) for index in range(2)] == [
            tokens_of_choice(rig, index) for index in range(2)
        ]
        assert rig.service.counters.num_migrations == 0
        await until(rig.is_at_rest)


@pytest.mark.known_failure(37)
async def test_moved_request_waits_for_a_worker_whose_queue_is_full(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=2, settings=with_settings(migration_limit=1)) as rig:
        rig.decode[0].die_after_tokens = 10
        rig.decode[1].refuse_code = "queue_full"
        answer = asyncio.create_task(rig.complete(PROMPT, **ASK, stream=True))
        await until(lambda: len(rig.decode[1].seen) >= 5)
        rig.decode[1].refuse_code = None

        assert streamed_tokens(await answer, 0) == tokens_of_choice(rig, 0)
        await until(rig.is_at_rest)


async def test_deadline_ends_the_wait_for_a_worker_whose_queue_is_full(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        time = LoopTime()
        rig.decode[0].refuse_code = "queue_full"
        asking = asyncio.create_task(
            rig.client.post("/v1/completions", json={"prompt": PROMPT, **ASK}, headers={"X-Request-Timeout": "30"})
        )
        await until(lambda: len(rig.decode[0].seen) >= 2)
        time.advance(30.0)
        response = await asking

        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert "queues are full" in response.json()["error"]["message"]
        await until(rig.is_at_rest)


async def test_choices_given_up_before_their_first_step_give_their_room_back(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=with_settings(max_num_queued=2)) as rig:
        await has_blocks(rig, 2 * BLOCKS_A_CHOICE)
        sampling = SamplingParams(max_tokens=NUM_TOKENS)
        texts = [
            TextRequest(request_id=f"r-{n}", prompt_token_ids=TokenIds.of((5, 6, 7)), sampling=sampling)
            for n in range(4)
        ]
        outputs = rig.service.generate_choices([texts])
        with pytest.raises(QueueFullError):
            rig.service.generate(dataclasses.replace(texts[0], request_id="one more"))
        for output in outputs:
            output.cancel()

        await until(rig.is_at_rest)
        assert completion_text(events(await rig.complete(PROMPT, **ASK, n=4, stream=True)))
        await until(rig.is_at_rest)


async def test_keys_take_turns_where_there_is_room_for_one_request_at_a_time(model_dir: Path) -> None:
    keys = {name: new_key() for name in ("many", "few")}
    security = SecuritySettings(api_keys=tuple(map(hash_key, keys.values())))
    ended: list[str] = []

    async def ask(rig: RouterRig, name: str) -> None:
        headers = {"Authorization": f"Bearer {keys[name]}"}
        answer = await rig.client.post("/v1/completions", json={"prompt": PROMPT, **ASK}, headers=headers)
        assert answer.status_code == 200
        ended.append(name)

    async with router_rig(model_dir, settings=FAST, security=security) as rig:
        await has_blocks(rig, BLOCKS_A_CHOICE)
        async with asyncio.TaskGroup() as group:
            for _ in range(40):
                group.create_task(ask(rig, "many"))
            await until(lambda: rig.service.num_waiting >= 35)
            group.create_task(ask(rig, "few"))

    assert len(ended) == 41
    assert ended.index("few") < 25, "it came behind nearly all of them"


async def test_one_key_does_not_keep_the_others_out(model_dir: Path) -> None:
    def text(number: int, owner: str) -> TextRequest:
        name = f"{owner}-{number}"
        origin = Origin(request_id=name, answer_id=name, owner=owner, endpoint="/v1/completions", received_s=0.0)
        return TextRequest(
            request_id=name,
            prompt_token_ids=TokenIds.of((5, 6, 7)),
            sampling=SamplingParams(max_tokens=NUM_TOKENS),
            origin=origin,
        )

    async with router_rig(model_dir, settings=with_settings(max_num_requests=8)) as rig:
        outputs = [rig.service.generate(text(0, "few"))]
        outputs += [rig.service.generate(text(number, "many")) for number in range(6)]

        with pytest.raises(QueueFullError, match="limit is 8, and the remaining places are left to other keys"):
            rig.service.generate(text(6, "many"))
        outputs.append(rig.service.generate(text(1, "few")))
        with pytest.raises(QueueFullError, match="the limit is 8; try"):
            rig.service.generate(text(2, "few"))

        for output in outputs:
            output.cancel()
        await until(rig.is_at_rest)
        assert rig.service.counters.num_refused == 2
