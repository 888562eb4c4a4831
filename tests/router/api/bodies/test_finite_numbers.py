"""Schemas and arguments are written again as JSON: numbers that JSON cannot write are refused, with their place."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.router.router_rig import RouterRig, router_rig

HUGE = 1e300  # 1e999 in the body
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "number", "default": HUGE}}}
USER = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"messages": [USER]}
CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": HUGE}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest.fixture
async def rig(model_dir: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(model_dir) as rig:
        yield rig


@pytest.mark.parametrize("written", ["1e999", "-1e999", "NaN", "Infinity"])
@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (
            "/v1/chat/completions",
            {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]},
            "tools.0.function.parameters",
        ),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"x": [HUGE]}}, "chat_template_kwargs"),
        ("/v1/messages", {**CHAT, "max_tokens": 5, "chat_template_kwargs": {"x": HUGE}}, "chat_template_kwargs"),
        ("/tokenize", {**CHAT, "chat_template_kwargs": {"x": HUGE}}, "chat_template_kwargs"),
        ("/v1/chat/completions", {**CHAT, "response_format": FORMAT}, "response_format.json_schema.schema"),
        ("/v1/completions", {"prompt": "hi", "structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        (
            "/v1/responses",
            {
                "input": "hi",
                "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
                "tool_choice": "none",
            },
            "tools.0.parameters",
        ),
        (
            "/v1/responses",
            {"input": "hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
            "text.format.schema",
        ),
        (
            "/v1/messages",
            {"messages": [USER], "max_tokens": 5, "tools": [{"name": "f", "input_schema": SCHEMA}]},
            "tools.0.input_schema",
        ),
        (
            "/v1/messages",
            {"messages": [USER, {"role": "assistant", "content": [CALL]}], "max_tokens": 5},
            "messages.1.content.0.input",
        ),
    ],
)
async def test_numbers_that_json_cannot_write_are_refused(
    rig: RouterRig, path: str, fields: dict[str, Any], place: str, written: str
) -> None:
    body = json.dumps(fields).replace("1e+300", written)
    response = await rig.client.post(path, content=body, headers={"Content-Type": "application/json"})

    assert response.status_code == 400
    message = f"the parameter '{place}' is invalid: it has a number that is not finite, such as NaN or 1e999"
    assert response.json()["error"]["message"] == message
