"""How many tools there may be and how they may be called, and where in the caller's body one is that may not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from router.grammar.checker import GrammarChecker
from router.grammar.readers import TOO_LONG, GrammarReaders, Reading
from router.text.tokenizer import Tokenizer
from tests.support.router.fake_workers import scripted
from tests.support.router.router_rig import RouterRig, router_rig
from tests.support.router.router_tokenizer import write_model_dir

TEMPLATE = (
    "{{ tools | length }}<tool_call>{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endfor %}"
)
LONG = "mcp__" + "a-b_" * 30 + "end"
"""128 characters, as many as Anthropic allows."""

USER = {"role": "user", "content": "hi"}


class CostlyReaders(GrammarReaders):
    """Finds that everything takes too long."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def problem_of(self, text: str, reading: Reading | None = None) -> str:
        self.texts.append(text)
        return f"{TOO_LONG} 5 s of CPU time"


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[RouterRig]:
    path = write_model_dir(tmp_path / "model", config={"chat_template": TEMPLATE})
    tokenizer = Tokenizer.load(path)
    called = tokenizer.encode(f'<tool_call>{{"name": "{LONG}", "arguments": {{}}}}</tool_call>')
    script = [*called, *tokenizer.encode("<|end|>")]
    async with router_rig(path, next_token=scripted(script), max_model_len=4096) as rig:
        yield rig


def chat(*names: str, called: str = "t0", call_id: str = "c1") -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": called, "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": call_id, "content": "done"}
    return {
        "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result],
        "tools": [{"type": "function", "function": {"name": name}} for name in names],
    }


def response(*names: str, called: str = "t0", call_id: str = "c1") -> dict[str, Any]:
    call = {"type": "function_call", "call_id": call_id, "name": called, "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": call_id, "output": "done"}
    return {"input": [USER, call, result], "tools": [{"type": "function", "name": name} for name in names]}


def message(*names: str, called: str = "t0", call_id: str = "c1") -> dict[str, Any]:
    call = {"type": "tool_use", "id": call_id, "name": called, "input": {}}
    result = {"type": "tool_result", "tool_use_id": call_id, "content": "done"}
    turns = [{"role": "assistant", "content": [{"type": "text", "text": "so"}, call]}]
    return {
        "messages": [USER, *turns, {"role": "user", "content": [result]}],
        "tools": [{"name": name, "input_schema": {"type": "object"}} for name in names],
        "max_tokens": 400,
    }


BODIES = {"/v1/chat/completions": chat, "/v1/responses": response, "/v1/messages": message}


def called_names(answer: Any) -> list[str]:
    """The names of the calls of an answer of any endpoint."""
    if "choices" in answer:
        return [call["function"]["name"] for call in answer["choices"][0]["message"]["tool_calls"]]
    items = answer.get("output") or answer["content"]
    return [item["name"] for item in items if item["type"] in ("function_call", "tool_use")]


@pytest.mark.parametrize("path", BODIES)
async def test_names_have_as_many_characters_as_anthropics(rig: RouterRig, path: str) -> None:
    answer = await rig.client.post(path, json=BODIES[path](LONG, "t0", called=LONG))

    assert answer.status_code == 200, answer.text
    assert called_names(answer.json()) == [LONG]


@pytest.mark.parametrize("path", BODIES)
async def test_there_may_be_a_thousand_tools_and_not_any_number(rig: RouterRig, path: str) -> None:
    names = [f"t{number}" for number in range(1025)]
    many = await rig.client.post(path, json=BODIES[path](*names[:1024]))
    too_many = await rig.client.post(path, json=BODIES[path](*names))

    assert many.status_code == 200, many.text
    assert rig.service.tokenizer.decode(rig.prefill[0].seen[-1].prompt_token_ids).startswith("1024<tool_call>")
    assert too_many.status_code == 400
    assert "'tools' is invalid: List should have at most 1024 items" in too_many.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        ("/v1/chat/completions", {"called": LONG + "x"}, "messages.1.tool_calls.0.function.name"),
        ("/v1/responses", {"called": LONG + "x"}, "input.1.name"),
        ("/v1/responses", {"called": "a b"}, "input.1.name"),
        ("/v1/responses", {"call_id": "c" * 257}, "input.1.call_id"),
        ("/v1/messages", {"called": LONG + "x"}, "messages.1.content.1.name"),
        ("/v1/messages", {"called": "a b"}, "messages.1.content.1.name"),
        ("/v1/messages", {"call_id": ""}, "messages.1.content.1.id"),
        ("/v1/messages", {"call_id": "c" * 257}, "messages.1.content.1.id"),
    ],
)
async def test_a_call_that_is_wrong_is_told_at_its_place(
    rig: RouterRig, path: str, fields: dict[str, Any], place: str
) -> None:
    answer = await rig.client.post(path, json=BODIES[path]("t0", **fields))

    assert answer.status_code == 400
    assert f"'{place}' is invalid" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("path", "place"), [("/v1/responses", "tools.1.name"), ("/v1/messages", "tools.1.name")])
async def test_a_tool_whose_name_is_too_long_is_told_at_its_place(rig: RouterRig, path: str, place: str) -> None:
    answer = await rig.client.post(path, json=BODIES[path]("t0", LONG + "x"))

    assert answer.status_code == 400
    assert f"'{place}' is invalid" in answer.json()["error"]["message"]


async def test_a_message_of_too_many_calls_is_told_as_one(rig: RouterRig) -> None:
    body = message("t0")
    turn = body["messages"][1]["content"]
    turn += [turn[1] | {"id": f"n{number}"} for number in range(1024)]
    answer = await rig.client.post("/v1/messages", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "the parameter 'messages.1' is invalid: a message has 1025 tool_use blocks, the limit is 1024"
    )


async def test_only_strict_tools_are_refused_for_a_pattern_that_no_grammar_follows(rig: RouterRig) -> None:
    price = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
    function = {"name": "buy", "parameters": {"type": "object", "properties": {"price": price}}}
    body = {"messages": [USER], "tools": [{"type": "function", "function": function}]}
    answer = await rig.client.post("/v1/chat/completions", json=body)
    function["strict"] = True
    refused = await rig.client.post("/v1/chat/completions", json=body)

    assert answer.status_code == 200, answer.text
    assert refused.status_code == 400
    assert "tools.0.function.parameters.properties.price" in refused.json()["error"]["message"]


async def test_tools_that_take_too_long_together_are_not_read_one_by_one(rig: RouterRig) -> None:
    readers = CostlyReaders()
    rig.service.grammars.close()
    rig.service.grammars = GrammarChecker(readers)
    tools = [{"type": "function", "function": {"name": f"t{number}"}} for number in range(5)]

    answer = await rig.chat(tools=tools, tool_choice="required")

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert len(readers.texts) == 1
