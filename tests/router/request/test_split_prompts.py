"""A prompt that two workers compute: the requests to each, and what happens if the first part is lost."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.contract.block_hash import prompt_keys
from engine.contract.messages import CacheChanges
from engine.contract.step_time import StepTimeModel
from engine.contract.token_ids import TokenIds
from tests.support.parity.halved_prompts import halved_prompts
from tests.support.router.fake_workers import counting
from tests.support.router.router_rig import FAST, RouterRig, router_rig, until

PROMPT = list(range(5, 105))
LONG_TAIL = list(range(5, 155))
NUM_TOKENS = 12
KNOWN = StepTimeModel(base_s=0.001, row_s=0.0005, prompt_token_s=0.005, error=0.1, num_steps=50)
ASK = {"max_tokens": NUM_TOKENS, "seed": 1, "return_token_ids": True, "ignore_eos": True}


@asynccontextmanager
async def splitting_rig(model_dir: Path, **changes: Any) -> AsyncIterator[RouterRig]:
    settings = dataclasses.replace(FAST, roles="elastic", decode_policy="queued_tokens", **changes)
    async with router_rig(model_dir, num_prefill=2, settings=settings) as rig:
        with halved_prompts(rig.service, head="prefill-0", tail="decode-0"):
            yield rig
            await until(rig.is_at_rest)


def expected(rig: RouterRig, index: int = 0) -> list[int]:
    request = rig.decode[0].seen[0]
    own = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, seed=1 + index))
    return [counting(own, position) for position in range(NUM_TOKENS)]


async def test_one_computes_the_beginning_and_the_other_draws_every_token(model_dir: Path) -> None:
    async with splitting_rig(model_dir) as rig:
        answer = (await rig.complete(PROMPT, **ASK)).json()

        (head,), (rest,) = rig.prefill[0].seen, rig.decode[0].seen
        assert (head.prompt_token_ids, head.hand_over) == (PROMPT[:50], True)
        assert (rest.prompt_token_ids, rest.output_token_ids) == (PROMPT, ())
        assert rest.kv_transfer is not None
        assert rest.max_recomputed_tokens is None
        assert answer["choices"][0]["token_ids"] == expected(rig)
        assert rig.service.counters.num_placed_split == 1


async def test_what_would_end_the_answer_does_not_end_its_beginning(model_dir: Path) -> None:
    async with splitting_rig(model_dir) as rig:
        everything = list(range(40, 240))

        answer = (await rig.complete(PROMPT, **{**ASK, "ignore_eos": False}, stop_token_ids=everything)).json()

        assert rig.prefill[0].seen[0].sampling.all_stop_ids == frozenset()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert len(rig.decode[0].seen) == 1


async def test_choices_compute_the_rest_where_the_first_one_did(model_dir: Path) -> None:
    async with splitting_rig(model_dir) as rig:
        answer = (await rig.complete(PROMPT, **ASK, n=2)).json()

        assert [choice["token_ids"] for choice in answer["choices"]] == [expected(rig), expected(rig, 1)]
        assert len(rig.prefill[0].seen) == 1
        assert [request.kv_transfer is None for request in rig.decode[0].seen] == [False, True]


@pytest.mark.parametrize("is_gone", [False, True])
async def test_without_its_beginning_the_other_computes_all(model_dir: Path, is_gone: bool) -> None:
    async with splitting_rig(model_dir) as rig:
        if is_gone:
            rig.prefill.kill("prefill-0")
        else:
            rig.prefill[0].error_code = "engine_dead"

        answer = (await rig.complete(PROMPT, **ASK)).json()

        assert answer["choices"][0]["token_ids"] == expected(rig)
        assert [request.kv_transfer for request in rig.decode[0].seen] == [None]
        assert rig.prefill[1].seen == []


async def test_a_beginning_that_cannot_be_read_is_not_computed_for_nothing_again(model_dir: Path) -> None:
    async with splitting_rig(model_dir, kv_lost_policy="retry") as rig:
        rig.decode[0].lost_loads = 1

        answer = (await rig.complete(PROMPT, **ASK)).json()

        assert answer["choices"][0]["token_ids"] == expected(rig)
        assert [request.max_recomputed_tokens for request in rig.decode[0].seen] == [None]
        assert len(rig.prefill[0].seen) == 1


@pytest.mark.parametrize("field", [{"prompt_logprobs": 1}, {"use_beam_search": True, "n": 2, "temperature": 0}])
async def test_what_tells_of_the_whole_prompt_is_not_split(model_dir: Path, field: dict[str, Any]) -> None:
    async with splitting_rig(model_dir) as rig:
        await rig.complete(PROMPT, **{**ASK, **field})

        assert rig.service.counters.num_placed_split == 0


async def test_a_busy_worker_hands_over_what_it_has_cached_and_an_idle_one_computes_the_rest(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=dataclasses.replace(FAST, roles="elastic")) as rig:
        for replica in (rig.prefill[0], rig.decode[0]):
            replica.gauges |= {"step_time": KNOWN, "counters": {"num_scheduled_tokens": 1000.0}}
        rig.prefill[0].gauges |= {"num_decoding": 30, "num_running": 30}
        pool = rig.service.decode_pool
        await until(lambda: all(item.load.step_time == KNOWN for item in pool.replicas))
        keys = np.array(prompt_keys(TokenIds.of(PROMPT).array[:-1], None, 16), "<u8").tobytes()
        pool.note_cache("prefill-0", [CacheChanges(first_sequence=0, next_sequence=6, stored=keys, is_snapshot=True)])

        answer = (await rig.complete(PROMPT + LONG_TAIL, **ASK)).json()

        (head,), (rest,) = rig.prefill[0].seen, rig.decode[0].seen
        assert len(head.prompt_token_ids) == 97
        assert rest.kv_transfer is not None
        assert answer["choices"][0]["token_ids"] == expected(rig)
        assert (await rig.client.get("/status")).json()["totals"]["placed_split"] == 1
        await until(rig.is_at_rest)
