"""How much one answer may tell of its tokens: bounded where it is written in one piece."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from router.text.tokenizer import Tokenizer
from tests.support.router.fake_workers import scripted
from tests.support.router.router_rig import RouterRig, router_rig

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
CONVERSATION: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20}
PROMPT: dict[str, Any] = {"prompt": "hi", "logprobs": 20}
INPUT: dict[str, Any] = {"input": "hi", "top_logprobs": 20}
LONG = 100_000


@pytest.fixture
async def rig(model_dir: Path) -> AsyncIterator[RouterRig]:
    ends_at_once = scripted(Tokenizer.load(model_dir).encode("<|end|>"))
    async with router_rig(model_dir, next_token=ends_at_once, max_model_len=2 * LONG) as rig:
        yield rig


def max_tokens_of(rig: RouterRig) -> set[int]:
    """The lengths of the choices that the workers were told."""
    return {request.sampling.max_tokens for request in rig.prefill[0].seen}


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (
            CHAT,
            {**CONVERSATION, "n": 128, "max_tokens": 4000},
            "max_tokens",
            "128 choices of up to 4000 tokens with 20",
        ),
        (CHAT, {**CONVERSATION, "max_completion_tokens": LONG}, "max_completion_tokens", "1 choice of up to 100000"),
        (TEXT, {**PROMPT, "n": 128, "max_tokens": 4000}, "max_tokens", "make 10752000 log-probabilities"),
        (TEXT, {**PROMPT, "prompt": ["a"] * 64, "n": 2, "max_tokens": 4000}, "max_tokens", "128 choices of up to 4000"),
        (TEXT, {**PROMPT, "best_of": 128, "max_tokens": 4000}, "max_tokens", "128 choices of up to 4000"),
        (
            RESPONSES,
            {**INPUT, "max_output_tokens": LONG},
            "max_output_tokens",
            "set max_output_tokens to 47619 or less",
        ),
        (RESPONSES, {**INPUT, "max_output_tokens": LONG, "stream": True}, "max_output_tokens", "the limit is 1000000"),
    ],
)
async def test_more_than_fits_in_one_piece_is_refused_naming_the_numbers(
    rig: RouterRig, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    response = await rig.client.post(path, json=fields)

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]
    assert rig.prefill[0].seen == []


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({"max_tokens": 32_768}, 32_768),
        ({"n": 8, "top_logprobs": 5, "max_tokens": 4096}, 4096),
        ({"n": 128, "logprobs": None, "top_logprobs": None, "max_tokens": 10_000}, 10_000),
        ({"n": 128, "max_tokens": 4000, "stream": True}, 4000),
    ],
)
async def test_ordinary_sizes_and_streams_are_served(rig: RouterRig, fields: dict[str, Any], max_tokens: int) -> None:
    body = {name: value for name, value in {**CONVERSATION, **fields}.items() if value is not None}

    assert (await rig.client.post(CHAT, json=body)).status_code == 200
    assert max_tokens_of(rig) == {max_tokens}


@pytest.mark.parametrize(
    ("path", "fields", "max_tokens"),
    [
        (CHAT, {**CONVERSATION, "n": 2}, 23_809),
        (RESPONSES, INPUT, 47_619),
    ],
)
async def test_an_answer_of_any_length_ends_where_no_more_can_be_told(
    rig: RouterRig, path: str, fields: dict[str, Any], max_tokens: int
) -> None:
    assert (await rig.client.post(path, json=fields)).status_code == 200
    assert max_tokens_of(rig) == {max_tokens}


async def test_a_streamed_answer_of_any_length_may_fill_the_context(rig: RouterRig) -> None:
    await rig.client.post(CHAT, json={**CONVERSATION, "stream": True})

    assert min(max_tokens_of(rig)) > LONG
