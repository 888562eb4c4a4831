"""The official client against the router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from router.text.tokenizer import Tokenizer
from tests.support.router.fake_workers import scripted
from tests.support.router.live_app import live_app
from tests.support.router.router_rig import RouterRig, router_rig

ANSWER = "hello world, how are you today? 日本 🙂"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@dataclass
class Live:
    rig: RouterRig
    client: openai.AsyncOpenAI
    num_tokens: int


@pytest.fixture
async def live(model_dir: Path) -> AsyncIterator[Live]:
    script = Tokenizer.load(model_dir).encode(ANSWER)
    async with (
        router_rig(model_dir, next_token=scripted(script)) as rig,
        live_app(rig.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Live(rig, client, len(script))


async def test_chat(live: Live) -> None:
    answer = await live.client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=live.num_tokens, temperature=0, seed=1
    )

    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == live.num_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + live.num_tokens


@pytest.mark.parametrize("is_dumped", [False, True])
async def test_answer_can_be_sent_back_as_a_turn(live: Live, is_dumped: bool) -> None:
    answer = await live.client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=live.num_tokens)
    message = answer.choices[0].message
    turn: Any = message.model_dump() if is_dumped else message

    await live.client.chat.completions.create(model="tiny", messages=[*MESSAGES, turn, *MESSAGES], max_tokens=1)

    prompt = live.rig.prefill[0].seen[1].prompt_token_ids
    assert f"[assistant] {ANSWER}" in live.rig.service.tokenizer.decode(prompt)


async def test_streamed_chat_with_usage(live: Live) -> None:
    stream = await live.client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=live.num_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == live.num_tokens


async def test_text_completion_with_stop(live: Live) -> None:
    answer = await live.client.completions.create(model="tiny", prompt="x", max_tokens=100, stop=["how"])

    assert answer.choices[0].text == "hello world, "
    assert answer.choices[0].finish_reason == "stop"


async def test_streamed_text_completion(live: Live) -> None:
    stream = await live.client.completions.create(model="tiny", prompt="x", max_tokens=live.num_tokens, stream=True)

    assert "".join([chunk.choices[0].text async for chunk in stream]) == ANSWER


async def test_extensions_go_through_the_extra_body(live: Live) -> None:
    answer = await live.client.completions.create(
        model="tiny", prompt=[5, 6], max_tokens=3, extra_body={"return_token_ids": True, "top_k": 4}
    )

    assert len(answer.choices[0].token_ids) == 3  # type: ignore[attr-defined]
    assert live.rig.prefill[0].seen[0].sampling.top_k == 4


async def test_token_ids_of_a_streamed_chat_come_beside_its_choices(live: Live) -> None:
    stream = await live.client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=3, n=2, stream=True, extra_body={"return_token_ids": True}
    )
    chunks = [chunk async for chunk in stream]
    tokens: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        tokens[chunk.choices[0].index] += getattr(chunk.choices[0], "token_ids", None) or []

    prompts = [chunk.prompt_token_ids for chunk in chunks if hasattr(chunk, "prompt_token_ids")]
    assert prompts == [list(live.rig.prefill[0].seen[0].prompt_token_ids)] * 2
    assert {index: len(ids) for index, ids in tokens.items()} == {0: 3, 1: 3}


async def test_multi_byte_characters_and_their_entries_over_tokens(live: Live) -> None:
    stream = await live.client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=live.num_tokens, stream=True, logprobs=True, top_logprobs=1
    )
    text, data = "", b""
    async for chunk in stream:
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        entries = choice.logprobs.content or [] if choice.logprobs is not None else []
        data += bytes(byte for entry in entries for byte in entry.bytes or ())
        assert data.decode() == text
    assert text == ANSWER


async def test_choices_after_the_first_go_where_it_went(model_dir: Path) -> None:
    async with router_rig(model_dir, num_prefill=3, num_decode=3) as rig:
        for number in range(3):
            await rig.complete([5, 6, number], n=4, max_tokens=3)

        for pool in (rig.prefill, rig.decode):
            homes = [{request.prompt_token_ids for request in replica.seen} for replica in pool.replicas.values()]
            assert sum(map(len, homes)) == 3


async def test_models(live: Live) -> None:
    models = await live.client.models.list()

    assert [model.id for model in models.data] == ["tiny"]
    assert (await live.client.models.retrieve("tiny")).id == "tiny"


async def test_errors_become_the_clients_exceptions(live: Live) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await live.client.completions.create(model="tiny", prompt="x", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="tiny"):
        await live.client.completions.create(model="other", prompt="x")


async def test_error_in_the_middle_of_a_stream_is_raised_there(live: Live) -> None:
    live.rig.decode[0].error_code = "kv_load_failed"
    stream = await live.client.completions.create(model="tiny", prompt="x", max_tokens=9, stream=True)

    with pytest.raises(openai.APIError, match="failed by the test"):
        async for _ in stream:
            pass


async def test_request_id_goes_in_and_out(live: Live) -> None:
    raw = await live.client.completions.with_raw_response.create(
        model="tiny", prompt="x", max_tokens=1, extra_headers={"X-Request-Id": "my-own-id"}
    )

    assert raw.headers["x-request-id"] == "my-own-id"
