"""Synthetic calls and schemas: a call fits its tool and its request, and an ordinary question needs none."""

import json
import re
from itertools import islice, pairwise
from random import Random
from typing import Any

import jsonschema
import pytest

from scripts.train_tiny.conversation import Kind, conversation, ordinary_exchange
from scripts.train_tiny.fields import fields_exchange, json_list_exchange
from scripts.train_tiny.messages import Message, Role
from scripts.train_tiny.probes import tool_call_probe, tool_unneeded_probe
from scripts.train_tiny.split import Split, split_of
from scripts.train_tiny.tools import MAX_TOOLS, ToolUse, is_met_by, random_tools, random_use, tools_text


def uses(number: int, split: Split = Split.TRAIN) -> list[ToolUse]:
    made = []
    for seed in range(number):
        rng = Random(seed)
        made.append(random_use(rng, split, random_tools(rng)))
    return made


def called(text: str) -> dict[str, Any]:
    match = re.fullmatch(r"<tool_call>\n(.+)\n</tool_call>", text)
    assert match is not None
    call: dict[str, Any] = json.loads(match.group(1))
    return call


def test_a_call_fits_the_schema_of_its_tool() -> None:
    for use in uses(300):
        call = called(use.exchanges[0].assistant)
        schema: Any = use.tool.schema()
        assert call["name"] == schema["function"]["name"]
        jsonschema.validate(call["arguments"], {**schema["function"]["parameters"], "additionalProperties": False})


def test_arguments_are_words_of_the_request() -> None:
    for use in uses(300):
        for argument in use.arguments.values():
            assert str(argument) in use.request


def test_an_answer_tells_the_result_or_that_it_is_done() -> None:
    for use in uses(300):
        told = use.result.removeprefix("{").removesuffix("}").rpartition(": ")[2].strip('"')
        assert told in use.answer or use.tool.kind.result == "done"
        assert "{" not in use.answer + use.request


def test_no_two_tools_of_a_chat_meet_one_request() -> None:
    for seed in range(300):
        rng = Random(seed)
        tools = random_tools(rng)
        assert 1 <= len(tools) <= MAX_TOOLS
        use = random_use(rng, Split.TRAIN, tools)
        assert is_met_by([use.tool], use.request)
        words = [word for tool in tools for word in tool.kind.words]
        assert len(words) == len(set(words))


def test_an_ordinary_question_is_none_for_the_tools() -> None:
    for seed in range(100):
        rng = Random(seed)
        tools = random_tools(rng)
        exchange = ordinary_exchange(rng, Split.TRAIN, tools)
        assert not is_met_by(tools, exchange.user)
        assert "tool_call" not in exchange.assistant


def test_a_chat_with_tools_lists_them_first_and_sends_each_call_its_result() -> None:
    for seed in range(20):
        messages = list(islice(conversation(Random(seed), Split.TRAIN, Kind.TOOLS, 300), 30))
        assert messages[0].role is Role.SYSTEM
        assert messages[0].text.startswith("Tools:\n")
        for message, following in pairwise(messages):
            assert ("<tool_call>" in message.text) == following.text.startswith("Result: ")


def test_a_schema_is_filled_with_what_the_text_says() -> None:
    rng = Random(1)
    for _ in range(300):
        exchange = fields_exchange(rng, Split.TRAIN)
        filled = json.loads(exchange.assistant)
        assert exchange.assistant == json.dumps(filled)
        assert 2 <= len(filled) <= 3
        for field, value in filled.items():
            assert re.search(rf"\b{field}\b", exchange.user), exchange
            assert str(value) in exchange.user


@pytest.mark.parametrize("split", Split)
def test_held_out_schemas_are_never_in_training(split: Split) -> None:
    rng = Random(1)
    for _ in range(50):
        values = json.loads(fields_exchange(rng, split).assistant).values()
        assert split_of("fields", *sorted(map(str, values))) is split


def test_held_out_arguments_are_never_in_training() -> None:
    asked = {
        split: {(use.tool.kind.words[0], *map(str, use.arguments.values())) for use in uses(400, split)}
        for split in Split
    }
    assert {use for use in asked[Split.TRAIN] & asked[Split.HELD_OUT] if len(use) > 1} == set()


def test_probes_list_the_tool_that_is_called_and_one_that_is_not() -> None:
    rng = Random(1)
    for _ in range(50):
        probe = tool_call_probe(rng)
        system, user = probe.messages
        assert (system.role, user.role) == (Role.SYSTEM, Role.USER)
        assert f"\n{called(probe.answer)['name']}(" in system.text
        assert "tool_call" not in tool_unneeded_probe(rng).answer


def test_tools_are_listed_a_line_each() -> None:
    rng = Random(1)
    tools = random_tools(rng, num_tools=3)
    message = Message(role=Role.SYSTEM, text=tools_text(tools))
    assert message.text.splitlines() == ["Tools:", *(tool.signature() for tool in tools)]


def test_words_are_given_as_a_json_list() -> None:
    rng = Random(1)
    for _ in range(50):
        exchange = json_list_exchange(rng)
        words = json.loads(exchange.assistant)
        assert ", ".join(words) in exchange.user
        assert len(words) >= 3
