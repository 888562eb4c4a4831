"""A real model, which has learnt no format, calls tools in each: its output matches the grammars, and is read
as calls.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from router.tools.registry import TOOL_FORMATS
from tests.support.router.model_router import model_router
from tests.support.router.router_rig import FAST


class Reading(BaseModel):
    """What is called, and what answers look like: no part of it can be long."""

    unit: Literal["celsius", "kelvin"]
    days: list[int] = Field(min_length=1, max_length=2)
    at_night: bool | None


@pytest.mark.parametrize("name", TOOL_FORMATS)
async def test_calls_and_answers_with_a_form(name: str, checkpoint_dir: Path) -> None:
    schema = Reading.model_json_schema()
    for part in schema["properties"]["days"]["items"], schema["properties"]["days"]:
        part |= {"minimum": 1, "maximum": 7} if part["type"] == "integer" else {}
    tool: Any = {"type": "function", "function": {"name": "read", "parameters": schema}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "reading", "schema": schema}}
    ask: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [tool],
        "max_tokens": 900,
        "temperature": 0,
        "parallel_tool_calls": False,
    }
    async with model_router(checkpoint_dir, settings=replace(FAST, tool_format=name)) as live:
        chats = live.client.chat.completions
        called: Any = (await chats.create(tool_choice="required", **ask)).choices[0]
        pieces = [chunk.choices[0] async for chunk in await chats.create(tool_choice="required", stream=True, **ask)]
        either: Any = (await chats.create(response_format=form, **ask)).choices[0]

    [call] = called.message.tool_calls
    Reading.model_validate_json(call.function.arguments)
    assert (called.finish_reason, called.message.content) == ("tool_calls", None)
    told = [item.function.arguments or "" for piece in pieces for item in piece.delta.tool_calls or ()]
    assert "".join(told) == call.function.arguments
    assert either.finish_reason in {"tool_calls", "stop"}
    written = either.message.tool_calls[0].function.arguments if either.message.tool_calls else either.message.content
    Reading.model_validate_json(written)
