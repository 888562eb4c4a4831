"""The built-in model's tools and schemas, by the official client through a real router, prefill and decode engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.model.builtin import builtin_model_dir
from tests.support.router.model_router import ModelRouter, model_router

QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIMER = {
    "type": "function",
    "function": {
        "name": "set_timer",
        "parameters": {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]},
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
async def router() -> AsyncIterator[ModelRouter]:
    async with model_router(builtin_model_dir()) as running:
        yield running


async def choice(router: ModelRouter, messages: list[dict[str, Any]], **fields: Any) -> Any:
    answer: Any = await router.client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=100, temperature=0, **fields
    )
    return answer.choices[0]


async def test_the_tool_that_fits_is_called_and_its_result_told(router: ModelRouter) -> None:
    tools = [TIMER, WEATHER]

    called = await choice(router, [QUESTION], tools=tools)

    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}
    said = called.message.model_dump(include={"role", "content", "tool_calls"})
    told = await choice(router, [QUESTION, said, result], tools=tools)
    assert told.finish_reason == "stop"
    assert told.message.content == "The weather in Paris is sunny, 21 degrees."


async def test_a_question_that_needs_no_tool_is_answered(router: ModelRouter) -> None:
    answered = await choice(router, [{"role": "user", "content": "Count from 7 to 10."}], tools=[TIMER, WEATHER])

    assert (answered.message.content, answered.message.tool_calls) == ("7, 8, 9, 10", None)


async def test_a_schema_is_filled_with_what_was_said(router: ModelRouter) -> None:
    question = {"role": "user", "content": "Give the name and the age as JSON: Mia is 7 years old."}
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}

    answered = await choice(router, [question], response_format=schema)

    assert json.loads(answered.message.content) == {"name": "Mia", "age": 7}
