"""Thinking, text and calls of tools, as both endpoints tell them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from router.text.tokenizer import Tokenizer
from tests.support.router.fake_workers import scripted
from tests.support.router.live_app import live_app
from tests.support.router.router_rig import RouterRig, router_rig
from tests.support.router.router_tokenizer import write_model_dir

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>\n{% endif %}"
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %} {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
ARGUMENTS = {"city": "Köln", "days": 2}
CALL = json.dumps({"name": "weather", "arguments": ARGUMENTS}, ensure_ascii=False)
WRITTEN = f"<think>Where is it?</think>I look.<tool_call>{CALL}</tool_call>"
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}


@pytest.fixture(scope="module")
def tool_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("tools"), config={"chat_template": TEMPLATE})


@pytest.fixture
async def rig(tool_dir: Path) -> AsyncIterator[RouterRig]:
    tokenizer = Tokenizer.load(tool_dir)
    script = [*tokenizer.encode(WRITTEN), *tokenizer.encode("<|end|>")]
    async with router_rig(tool_dir, next_token=scripted(script), max_model_len=2048) as rig:
        yield rig


def prompt(rig: RouterRig) -> str:
    return rig.service.tokenizer.decode(rig.prefill[0].seen[-1].prompt_token_ids)


async def test_response_has_reasoning_a_message_and_a_call(rig: RouterRig) -> None:
    tool: Any = {
        "type": "function",
        "name": "weather",
        "description": "How it is.",
        "parameters": SCHEMA,
        "strict": True,
    }
    async with (
        live_app(rig.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        options: Any = {"model": "tiny", "input": "Rain?", "tools": [tool], "max_output_tokens": 300}
        answer: Any = await client.responses.create(**options)
        async with client.responses.stream(**options) as stream:
            kinds = [event.type async for event in stream]
            streamed: Any = await stream.get_final_response()
        results: Any = [{"type": "function_call_output", "call_id": answer.output[-1].call_id, "output": "sun"}]
        await client.responses.create(**{**options, "input": results, "previous_response_id": answer.id})
        continued = prompt(rig)

    for each in (answer, streamed):
        reasoning, message, call = each.output
        assert reasoning.type == "reasoning"
        assert [part.text for part in reasoning.content or ()] == ["Where is it?"]
        assert message.type == "message"
        assert each.output_text == "I look."
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("weather", ARGUMENTS)
        assert each.usage is not None
        assert each.usage.output_tokens_details.reasoning_tokens > 0
    assert {"response.reasoning_text.delta", "response.function_call_arguments.delta"} <= set(kinds)
    assert kinds[-1] == "response.completed"
    assert "[user] Rain?\n[assistant]<think>Where is it?</think> I look.<tool_call>" in continued
    assert continued.endswith("[tool] sun\n[assistant] ")


async def test_message_has_thinking_text_and_tool_use(rig: RouterRig) -> None:
    tool: Any = {"name": "weather", "description": "How it is.", "input_schema": SCHEMA}
    async with (
        live_app(rig.app) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        options: Any = {"model": "tiny", "tools": [tool], "max_tokens": 300}
        user: Any = {"role": "user", "content": "Rain?"}
        answer: Any = await client.messages.create(messages=[user], **options)
        async with client.messages.stream(messages=[user], **options) as stream:
            streamed: Any = await stream.get_final_message()
        assert answer.content[-1].type == "tool_use"
        result = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": "sun"}
        turns: Any = [user, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        await client.messages.create(messages=turns, **options)
        continued = prompt(rig)

    for each in (answer, streamed):
        assert each.stop_reason == "tool_use"
        thinking, text, call = each.content
        assert thinking.type == "thinking"
        assert thinking.thinking == "Where is it?"
        assert text.type == "text"
        assert text.text == "I look."
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("weather", ARGUMENTS)
    assert "[assistant]<think>Where is it?</think> I look.<tool_call>" in continued
    assert continued.endswith("[tool] sun\n[assistant] ")


async def test_log_probabilities_are_those_of_the_message(rig: RouterRig) -> None:
    body: dict[str, Any] = {
        "input": "Rain?",
        "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
        "include": ["message.output_text.logprobs"],
    }
    whole = (await rig.client.post("/v1/responses", json=body)).json()
    streamed = await rig.client.post("/v1/responses", json={**body, "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.text.splitlines() if line.startswith("data")]

    [message] = [item for item in whole["output"] if item["type"] == "message"]
    told = [item["token"] for item in message["content"][0]["logprobs"]]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert "".join(told) == "I look."
    assert [item["token"] for event in deltas for item in event["logprobs"]] == told
    assert done["logprobs"] == message["content"][0]["logprobs"]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"type": "function", "name": "other"}, "other"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}, "other"),
    ],
)
async def test_choice_of_no_tool_is_refused(rig: RouterRig, choice: Any, words: str) -> None:
    body = {"input": "x", "tools": [{"type": "function", "name": "weather"}], "tool_choice": choice}
    answer = await rig.client.post("/v1/responses", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tool_choice"
    assert words in answer.json()["error"]["message"]


CONVERSATION: Any = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
BAD_SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "str"}}}
FORM: Any = {"type": "json_schema", "schema": {"enum": ["grey"]}}


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (
            "/v1/responses",
            {"tools": [{"type": "function", "name": "w", "parameters": BAD_SCHEMA}]},
            "'tools.0.parameters.properties.a' is invalid: Invalid type: str",
        ),
        ("/v1/responses", {"tools": [{"type": "function", "name": "a b"}]}, "'tools.0.name'"),
        ("/v1/responses", {"tools": [{"type": "function", "function": {"name": "w"}}]}, "beside 'type'"),
        (
            "/v1/responses",
            {
                "tools": [{"type": "function", "name": "w"}],
                "tool_choice": {"type": "function", "function": {"name": "w"}},
            },
            "beside 'type'",
        ),
        (
            "/v1/messages",
            {"tools": [{"name": "w", "input_schema": BAD_SCHEMA}]},
            "'tools.0.input_schema.properties.a' is invalid: Invalid type: str",
        ),
        ("/v1/messages", {"tool_choice": {"type": "any"}}, "tool_choice needs tools to call"),
        ("/v1/messages", {"output_format": FORM, "output_config": {"format": FORM}}, "send only one of them"),
    ],
)
async def test_refusals_tell_where_a_tool_is_wrong(
    rig: RouterRig, path: str, fields: dict[str, Any], words: str
) -> None:
    said = {"input": "x"} if path == "/v1/responses" else CONVERSATION
    answer = await rig.client.post(path, json={**said, **fields})

    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "x", "text": {"format": {**FORM, "name": "sky"}}}),
        ("/v1/messages", {"output_config": {"format": FORM}}),
        ("/v1/messages", {"output_format": FORM}),
    ],
)
async def test_workers_get_the_grammar_of_the_form(rig: RouterRig, path: str, fields: dict[str, Any]) -> None:
    said = CONVERSATION if path == "/v1/messages" else {}
    assert (await rig.client.post(path, json={**said, **fields})).status_code == 200

    grammar = rig.prefill[0].seen[-1].sampling.grammar
    assert grammar is not None
    assert '"enum":["grey"]' in grammar
