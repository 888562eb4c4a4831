"""/v1/messages by the official client: answers, streams, counts, keys and refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from router.security import SecuritySettings, hash_key, new_key
from router.text.tokenizer import Tokenizer
from tests.support.loop_time import LoopTime
from tests.support.router.fake_workers import scripted
from tests.support.router.live_app import live_app
from tests.support.router.router_rig import RouterRig, router_rig, until

ANSWER = "hello world, how are you today? 日本 🙂"
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
USER: dict[str, Any] = {"role": "user", "content": "hi"}


@dataclass
class Live:
    rig: RouterRig
    client: anthropic.AsyncAnthropic
    num_tokens: int

    async def create(self, **options: Any) -> Message:
        options = {"model": "tiny", "messages": [USER], "max_tokens": self.num_tokens, **options}
        answer: Message = await self.client.messages.create(**options)
        return answer

    def prompt(self) -> str:
        return self.rig.service.tokenizer.decode(self.rig.prefill[0].seen[-1].prompt_token_ids)


@pytest.fixture
async def live(model_dir: Path) -> AsyncIterator[Live]:
    tokenizer = Tokenizer.load(model_dir)
    script = [*tokenizer.encode(ANSWER), *tokenizer.encode("<|end|>")]
    async with (
        router_rig(model_dir, next_token=scripted(script)) as rig,
        live_app(rig.app) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        yield Live(rig, client, len(script) - 1)


async def test_answer(live: Live) -> None:
    answer = await live.create(
        system=[{"type": "text", "text": "Be brief."}],
        messages=[
            USER,
            {"role": "assistant", "content": "ho"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
        ],
    )

    assert live.prompt() == ("[system] Be brief.\n[user] hi\n[assistant] ho\n[user] a\n[assistant] ")
    assert [block.text for block in answer.content if block.type == "text"] == [ANSWER]
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("max_tokens", None, "assistant")
    assert answer.usage.output_tokens == live.num_tokens
    assert answer.usage.input_tokens == len(live.rig.prefill[0].seen[-1].prompt_token_ids)


async def test_last_turn_of_the_assistant_is_continued(live: Live) -> None:
    await live.create(messages=[USER, {"role": "assistant", "content": "I say"}])

    assert live.prompt().endswith("[user] hi\n[assistant] I say")


async def test_how_it_stopped(live: Live) -> None:
    ended = await live.create(max_tokens=live.num_tokens + 1)
    stopped = await live.create(stop_sequences=["you"])

    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "you")
    assert stopped.content[0].text == "hello world, how are "  # type: ignore[union-attr]


async def test_events_are_those_that_clients_know(live: Live) -> None:
    body = {"messages": [USER], "stream": True, "max_tokens": live.num_tokens}
    answer = await live.rig.client.post("/v1/messages", json=body)
    parts = [part.split("\n") for part in answer.text.split("\n\n") if part]
    kinds = [name.removeprefix("event: ") for name, _ in parts]
    events: list[Any] = [EVENT.validate_json(data.removeprefix("data: ")) for name, data in parts if "ping" not in name]

    assert [kind for kind in kinds if kind != "ping"] == [event.type for event in events]
    num_deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * num_deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == ANSWER
    assert events[-2].delta.stop_reason == "max_tokens"
    assert events[-2].usage.output_tokens == live.num_tokens


async def test_stream_helper(live: Live) -> None:
    async with live.client.messages.stream(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=live.num_tokens
    ) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()

    assert text == ANSWER
    whole = await live.create()
    assert [block.type for block in final.content] == [block.type for block in whole.content]
    assert final.usage.output_tokens == whole.usage.output_tokens


async def test_count_of_tokens_is_that_of_the_prompt(live: Live) -> None:
    messages: Any = [USER, {"role": "assistant", "content": "ho"}, USER]
    counted = await live.client.messages.count_tokens(model="tiny", messages=messages, system="Be brief.")
    answer = await live.create(messages=messages, system="Be brief.")

    assert counted.input_tokens == answer.usage.input_tokens


async def test_client_that_leaves_ends_its_message(live: Live) -> None:
    live.rig.decode[0].step_gate.clear()
    stream: Any = await live.client.messages.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=200, stream=True
    )
    await anext(aiter(stream))
    await stream.close()

    await until(live.rig.is_at_rest)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"max_tokens": 9999}, "maximum context length"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
        "tool_use",
    ),
    ({"messages": []}, "messages"),
    ({"stop_sequences": ["x"] * 99}, "stop_sequences"),
    ({"n": 2}, "unknown parameter 'n'"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
async def test_refusals_name_the_parameter(live: Live, options: dict[str, Any], words: str) -> None:
    answer = await live.rig.client.post("/v1/messages", json={"messages": [USER], "max_tokens": 5, **options})

    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert words in answer.json()["error"]["message"]


async def test_refused_thread_tells_the_client_to_go_on_without_one(live: Live) -> None:
    with pytest.raises(anthropic.BadRequestError, match="thread") as caught:
        await live.create(extra_body={"thread": {"type": "create"}})
    with pytest.raises(anthropic.BadRequestError, match="mcp_servers") as other:
        await live.create(extra_body={"mcp_servers": [{"type": "url"}]})

    body: Any = caught.value.body
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert isinstance(other.value.body, dict)
    assert "details" not in other.value.body["error"]


async def test_errors_are_the_clients_own(live: Live) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no-such-model"):
        await live.create(model="no-such-model")
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        await live.create(extra_body={"temperature": -1})
    wrong_method = await live.rig.client.get("/v1/messages")
    assert (wrong_method.status_code, wrong_method.json()["type"]) == (405, "error")
    too_large = await live.rig.client.post("/v1/messages", json={"messages": [USER], "system": "x" * 9_000_000})
    assert (too_large.status_code, too_large.json()["error"]["type"]) == (413, "request_too_large")


async def test_error_in_a_stream_is_an_event(live: Live) -> None:
    live.rig.decode[0].step_gate.clear()
    stream = await live.client.messages.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=200,
        stream=True,
        extra_headers={"X-Request-Timeout": "30"},
    )
    LoopTime().advance(30.0)
    with pytest.raises(anthropic.APIStatusError, match="did not finish within"):
        [event async for event in stream]


async def test_what_has_no_effect_is_told(live: Live) -> None:
    blocks = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    body = {
        "messages": [{"role": "user", "content": blocks}],
        "max_tokens": 1,
        "metadata": {"user_id": "me"},
        "thinking": {"type": "enabled", "budget_tokens": 2000},
    }
    answer = await live.rig.client.post("/v1/messages", json=body)

    told = answer.headers["x-baton-ignored"].split(", ")
    assert told == ["messages.content.cache_control", "metadata", "thinking.type"]


async def test_key_may_come_as_anthropics_clients_send_it(model_dir: Path) -> None:
    key = new_key()
    async with router_rig(model_dir, security=SecuritySettings(api_keys=(hash_key(key),))) as rig:
        body = {"messages": [USER], "max_tokens": 2}
        good = await rig.client.post("/v1/messages", json=body, headers={"X-Api-Key": key})
        bad = await rig.client.post("/v1/messages", json=body, headers={"X-Api-Key": key + "x"})
        twice = await rig.client.post("/v1/messages", json=body, headers=[("X-Api-Key", key), ("X-Api-Key", key)])
        wrong_bearer = {"X-Api-Key": key, "Authorization": "Bearer wrong"}
        both = await rig.client.post("/v1/messages", json=body, headers=wrong_bearer)

    assert [answer.status_code for answer in (good, bad, twice, both)] == [200, 401, 401, 401]
    assert bad.json()["error"]["type"] == "authentication_error"
