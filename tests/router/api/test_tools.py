"""Tools and thinking over the API: what the template gets, the grammar that workers get, whole and streamed answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer

from tests.support.cluster.tool_clients import TOOL_CLIENTS
from tests.support.parity.answers import read_answer
from tests.support.router.fake_workers import scripted
from tests.support.router.live_app import live_app
from tests.support.router.router_rig import RouterRig, events, router_rig
from tests.support.router.router_tokenizer import EOS, byte_level_tokenizer, write_model_dir

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{{ call.id }}{% endfor %}"
    "{{ message.tool_call_id }}{% endfor %}"
    "{% if enable_thinking is false %}<think></think>{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THOUGHT = "<think>\nParis, then.\n</think>\n\n"
USER = {"role": "user", "content": "How is the weather?"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "stop", "arguments": '{"a": 1}'}}],
}
FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "sky",
        "schema": {"type": "object", "properties": {"sky": {"enum": ["grey"]}}, "required": ["sky"]},
    },
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "It stopped."}


def tokenizer() -> Tokenizer:
    made = byte_level_tokenizer()
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<tool_call>", "</tool_call>")])
    made.add_tokens([AddedToken(name, special=False) for name in ("<think>", "</think>")])
    return made


@pytest.fixture(scope="module")
def tools_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("tools"), tokenizer=tokenizer(), config={"chat_template": TEMPLATE})


def answering(path: Path, text: str) -> AbstractAsyncContextManager[RouterRig]:
    """A router whose workers say a text, and nothing else."""
    return router_rig(path, next_token=scripted(tokenizer().encode(text + EOS, add_special_tokens=False).ids))


def allowed(mode: str, name: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}}]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def with_schema(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "tools": [WEATHER, STOP], "max_tokens": 200, **fields}


async def post(rig: RouterRig, **fields: Any) -> httpx.Response:
    return await rig.client.post("/v1/chat/completions", json=body(**fields))


def deltas(response: httpx.Response) -> list[dict[str, Any]]:
    return [choice["delta"] for event in events(response) for choice in event["choices"]]


async def test_calls_come_apart_from_content(tools_dir: Path) -> None:
    async with answering(tools_dir, f"{THOUGHT}Let me see.\n{CALL}") as rig:
        answer = (await post(rig)).json()

    message = answer["choices"][0]["message"]
    call = message["tool_calls"][0]
    assert message["content"] == "Let me see."
    assert message["reasoning"] == message["reasoning_content"] == "Paris, then."
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert call["id"].startswith("call_")
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    num_thought = len(tokenizer().encode(THOUGHT.rstrip(), add_special_tokens=False).ids)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}


async def test_reasoning_is_left_out_where_it_is_not_wanted(tools_dir: Path) -> None:
    async with answering(tools_dir, f"{THOUGHT}Let me see.\n{CALL}") as rig:
        plain = (await post(rig)).json()
        wanted = (await post(rig, include_reasoning=True)).json()
        hidden = (await post(rig, include_reasoning=False)).json()
        streamed = await post(rig, include_reasoning=False, stream=True, logprobs=True)
        refused = await post(rig, include_reasoning="no")
    messages = [answer["choices"][0]["message"] for answer in (plain, wanted, hidden)]
    for message in messages:
        del message["tool_calls"][0]["id"]

    assert messages[0] == messages[1]
    assert messages[0] == {**messages[2], "reasoning": "Paris, then.", "reasoning_content": "Paris, then."}
    assert hidden["usage"] == plain["usage"]
    assert all("reasoning" not in name for delta in deltas(streamed) for name in delta)
    assert "".join(delta.get("content", "") for delta in deltas(streamed)) == "Let me see."
    assert len(read_answer(streamed)["choices"][0]["logprobs"]["content"]) == plain["usage"]["completion_tokens"]
    assert refused.json()["error"]["param"] == "include_reasoning"


async def test_hidden_reasoning_makes_no_events(tools_dir: Path) -> None:
    async with answering(tools_dir, THOUGHT) as rig:
        told = deltas(await post(rig, stream=True, include_reasoning=False))

    assert told == [{"role": "assistant", "content": ""}, {}]


async def test_content_is_null_beside_calls_alone(tools_dir: Path) -> None:
    async with answering(tools_dir, CALL) as rig:
        message = (await post(rig)).json()["choices"][0]["message"]

    assert message["content"] is None
    assert message["reasoning"] is None


@pytest.mark.parametrize("text", [CALL, f"{THOUGHT}So: {CALL}\n{CALL}"])
async def test_stream_tells_the_same(tools_dir: Path, text: str) -> None:
    async with answering(tools_dir, text) as rig:
        whole = (await post(rig, n=2)).json()["choices"][1]
        response = await post(rig, n=2, stream=True)
    choices = [item for event in events(response) for item in event["choices"] if item["index"] == 1]

    told: dict[str, str] = {}
    calls: list[dict[str, Any]] = []
    for choice in choices:
        for name in ("content", "reasoning", "reasoning_content"):
            told[name] = told.get(name, "") + (choice["delta"].get(name) or "")
        for piece in choice["delta"].get("tool_calls", []):
            if piece["index"] == len(calls):
                assert piece["id"]
                calls.append({"type": piece["type"], "name": piece["function"]["name"], "arguments": ""})
            calls[-1]["arguments"] += piece["function"]["arguments"]
    message = whole["message"]
    assert told == {name: message[name] or "" for name in told}
    assert [(call["name"], call["arguments"]) for call in calls] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
    ]
    assert choices[-1]["finish_reason"] == whole["finish_reason"] == "tool_calls"


async def test_arguments_are_streamed_as_they_come(tools_dir: Path) -> None:
    async with answering(tools_dir, CALL) as rig:
        response = await post(rig, stream=True, logprobs=True)
    pieces = [piece for delta in deltas(response) for piece in delta.get("tool_calls", [])]

    assert len(pieces) > 3
    assert "name" in pieces[0]["function"]
    assert all(set(piece) == {"index", "function"} for piece in pieces[1:])


async def test_usage_grows_with_the_stream_also_where_it_ends_amid_a_call(tools_dir: Path) -> None:
    num_tokens = len(tokenizer().encode(CALL, add_special_tokens=False).ids) - 5
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with answering(tools_dir, CALL) as rig:
        response = await post(rig, stream=True, max_tokens=num_tokens, stream_options=options)
    chunks = events(response)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]

    assert "tool_calls" in chunks[-3]["choices"][0]["delta"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert counts == sorted(counts)
    assert counts[-3:] == [num_tokens] * 3


async def test_every_token_keeps_its_log_probability(tools_dir: Path) -> None:
    async with answering(tools_dir, f"{THOUGHT}{CALL}") as rig:
        whole = (await post(rig, logprobs=True, top_logprobs=1)).json()
        streamed = read_answer(await post(rig, logprobs=True, top_logprobs=1, stream=True))

    entries = whole["choices"][0]["logprobs"]["content"]
    assert len(entries) == whole["usage"]["completion_tokens"]
    assert len(streamed["choices"][0]["logprobs"]["content"]) == len(entries)


async def test_without_tools_marks_are_content(tools_dir: Path) -> None:
    async with answering(tools_dir, f"{THOUGHT}ok {CALL}") as rig:
        without = (await post(rig, tools=None)).json()["choices"][0]
        none = (await post(rig, tool_choice="none")).json()["choices"][0]

    assert without["message"]["reasoning"] == "Paris, then."
    assert "get_weather" in without["message"]["content"]
    assert (without["finish_reason"], none["finish_reason"]) == ("stop", "stop")
    assert without["message"] == none["message"]


async def test_a_stop_string_ends_calls_too(tools_dir: Path) -> None:
    async with answering(tools_dir, CALL) as rig:
        choice = (await post(rig, stop="Par")).json()["choices"][0]

    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Par")
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'


async def test_template_gets_tools_calls_and_results(tools_dir: Path) -> None:
    conversation = {"messages": [USER, CALLED, RESULT], "tools": [STOP]}
    async with answering(tools_dir, "Good.") as rig:
        tokens = (await rig.client.post("/tokenize", json=conversation)).json()["tokens"]
        answer = await post(rig, **conversation)
        hidden = await post(rig, messages=[USER], tool_choice="none")
        stop = await post(rig, messages=[USER], tools=[STOP])
        allowed_stop = await post(rig, messages=[USER], tools=[WEATHER, STOP], tool_choice=allowed("auto", "stop"))

    text = tokenizer().decode(tokens, skip_special_tokens=False)
    assert '[{"type": "function", "function": {"name": "stop"}}]' in text
    assert '<tool_call>{"name": "stop", "arguments": {"a": 1}}</tool_call>c1' in text
    assert "[tool]It stopped.c1" in text
    assert answer.status_code == hidden.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == len(tokens)
    assert hidden.json()["usage"]["prompt_tokens"] < len(tokens)
    assert allowed_stop.json()["usage"]["prompt_tokens"] == stop.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ('{"a": 1, "b": "Par', '{"a": 1, "b": "Par"}'),
        ('{"a": [1, {"b": tr', '{"a": [1, {}]}'),
        ("{", "{}"),
        ("", "{}"),
        (r'{"a": ["\ud83d\ude00 \ud83d"], "\udc00": 1}', '{"a": ["\U0001f600 \ufffd"], "\ufffd": 1}'),
        ("not JSON", '"not JSON"'),
        ("[1, 2]", '"[1, 2]"'),
        (r'{"a": \ud83d', r'"{\"a\": \\ud83d"'),
    ],
)
async def test_arguments_can_be_sent_back_whatever_they_are(tools_dir: Path, sent: str, read: str) -> None:
    """A call that ended with ``max_tokens``, an emoji cut in two, what a model wrote that is no JSON."""
    function = {"name": "stop", "arguments": sent}
    called = {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    async with answering(tools_dir, "Good.") as rig:
        answer = await rig.client.post("/tokenize", json={"messages": [USER, called, RESULT], "tools": [STOP]})

    text = tokenizer().decode(answer.json()["tokens"], skip_special_tokens=False)
    assert f'<tool_call>{{"name": "stop", "arguments": {read}}}</tool_call>c1' in text


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [STOP, STOP]}, "tools"),
        ({"tools": [{"type": "custom"}]}, "tools.0"),
        ({"tools": [{"type": "function", "name": "a"}]}, "tools.0"),
        ({"tool_choice": {"type": "function", "name": "stop"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice"),
        ({"tool_choice": allowed("required", "other")}, "tool_choice"),
        ({"tools": [STOP, with_schema({"a": {"type": "str"}})]}, "tools.1.function.parameters.properties.a"),
        ({"tools": [with_schema({"a": {"$ref": "#/no"}})]}, "tools.0.function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools.0.function.parameters"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
            "tools.0.function.parameters",
        ),
        ({"messages": [USER, CALLED, {"role": "tool", "content": "x"}]}, "messages.2"),
        ({"messages": [{**USER, "tool_calls": CALLED["tool_calls"]}]}, "messages.0"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ],
)
async def test_what_cannot_be_followed_is_refused(tools_dir: Path, fields: dict[str, Any], place: str) -> None:
    async with answering(tools_dir, "Good.") as rig:
        response = await post(rig, **fields)

    assert response.status_code == 400, response.text
    assert f"'{place}" in response.json()["error"]["message"]


async def test_a_model_without_a_format_takes_no_tools(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        response = await post(rig)
        budget = await post(rig, tools=None, thinking_token_budget=5)

    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert (budget.status_code, budget.json()["error"]["param"]) == (400, "thinking_token_budget")


GRAMMARS: Sequence[tuple[dict[str, Any], str | None]] = [
    ({"tools": None}, None),
    ({"tool_choice": "none"}, None),
    ({}, "get_weather"),
    ({"tool_choice": "required"}, "get_weather"),
    ({"tool_choice": NAMED}, "get_weather"),
    ({"tool_choice": allowed("auto", "stop")}, "start: (begin call)*"),
    ({"tool_choice": allowed("required", "stop")}, "start: <["),
    ({"response_format": FORM}, '"get_weather'),
    ({"response_format": FORM}, '"enum":["grey"]'),
    ({"response_format": FORM, "tool_choice": "required"}, '"get_weather'),
    ({"tools": None, "thinking_token_budget": 7}, "max_tokens=7"),
]


@pytest.mark.parametrize(("fields", "said"), GRAMMARS)
async def test_workers_get_the_grammar_of_the_answer(tools_dir: Path, fields: dict[str, Any], said: str | None) -> None:
    seen: list[str | None] = []
    end = tokenizer().encode(EOS, add_special_tokens=False).ids[0]

    def note(request: Any, _: int) -> int:
        seen.append(request.sampling.grammar)
        return end

    async with router_rig(tools_dir, next_token=note) as rig:
        assert (await post(rig, **fields)).status_code == 200

    assert (seen[0] is None) == (said is None)
    assert said is None or (seen[0] is not None and said in seen[0])


FORM = {"type": "json_schema", "json_schema": {"name": "report", "schema": {"type": "object", "title": "Report"}}}


@pytest.mark.parametrize(
    ("choice", "names_tool", "has_form"),
    [("auto", True, True), ("required", True, False), (NAMED, True, False), ("none", False, True)],
)
async def test_a_form_holds_for_answers_that_call_nothing(
    tools_dir: Path, choice: object, names_tool: bool, has_form: bool
) -> None:
    seen: list[str] = []
    end = tokenizer().encode(EOS, add_special_tokens=False).ids[0]

    def note(request: Any, _: int) -> int:
        seen.append(request.sampling.grammar)
        return end

    async with router_rig(tools_dir, next_token=note) as rig:
        response = await post(rig, tool_choice=choice, response_format=FORM)

    assert response.status_code == 200, response.text
    assert ("get_weather" in seen[0], "Report" in seen[0]) == (names_tool, has_form)


async def test_answers_of_a_form_are_content_beside_tools(tools_dir: Path) -> None:
    said = '{"city": "Paris"}'
    async with answering(tools_dir, said) as rig:
        answer = (await post(rig, response_format=FORM)).json()["choices"][0]
    async with answering(tools_dir, CALL) as rig:
        calling = (await post(rig, response_format=FORM)).json()["choices"][0]

    assert (answer["message"]["content"], answer["finish_reason"]) == (said, "stop")
    assert (calling["message"]["content"], calling["finish_reason"]) == (None, "tool_calls")
    assert calling["message"]["tool_calls"][0]["function"]["arguments"] == said


async def test_a_template_that_ends_thinking_leaves_content(tools_dir: Path) -> None:
    async with answering(tools_dir, "<think>x") as rig:
        answer = (await post(rig, enable_thinking=False, tools=None)).json()

    assert answer["choices"][0]["message"]["content"] == "<think>x"


@pytest.mark.parametrize("name", ["openai parse", "openai stream"])
async def test_the_official_client_reads_calls(tmp_path: Path, name: str) -> None:
    short = TEMPLATE.replace("tools | tojson", "tools | length")
    path = write_model_dir(tmp_path / "model", tokenizer=tokenizer(), config={"chat_template": short})
    text = '<tool_call>\n{"name": "Unit", "arguments": {"unit": "kelvin"}}\n</tool_call>'
    async with answering(path, text) as rig, live_app(rig.app) as url:
        assert await asyncio.to_thread(TOOL_CLIENTS[name], url, rig.service.model_name) == {"unit": "kelvin"}
