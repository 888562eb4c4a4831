"""A model with a chat template of its own for conversations with tools, as Hermes 3 and Command R have it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.text.tokenizer import Tokenizer
from tests.support.router.fake_workers import scripted
from tests.support.router.router_rig import RouterRig, router_rig
from tests.support.router.router_tokenizer import write_model_dir

DEFAULT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ mood }}"
TOOL_USE = (
    "{{ tools | tojson }}<tool_call>{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if enable_thinking is false %}[quick]{% endif %}"
)
CALL = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "stop"}}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[RouterRig]:
    templates = [{"name": "default", "template": DEFAULT}, {"name": "tool_use", "template": TOOL_USE}]
    path = write_model_dir(tmp_path / "model", config={"chat_template": templates})
    tokenizer = Tokenizer.load(path)
    script = [*tokenizer.encode(CALL), *tokenizer.encode("<|end|>")]
    async with router_rig(path, next_token=scripted(script)) as rig:
        yield rig


async def post(rig: RouterRig, path: str, **fields: Any) -> tuple[httpx.Response, str]:
    """The answer, and the prompt that it is an answer to."""
    answer = await rig.client.post(path, json={"messages": [USER], "max_tokens": 100, **fields})
    assert answer.status_code == 200, answer.text
    return answer, rig.service.tokenizer.decode(rig.prefill[0].seen[-1].prompt_token_ids)


async def test_conversation_with_tools_has_their_template_and_its_format_of_calls(rig: RouterRig) -> None:
    answer, prompt = await post(rig, "/v1/chat/completions", tools=[TOOL])
    tokens = (await rig.client.post("/tokenize", json={"messages": [USER], "tools": [TOOL]})).json()["tokens"]

    assert prompt == '[{"type": "function", "function": {"name": "stop"}}]<tool_call>[user]hi'
    assert rig.service.tokenizer.decode(tokens) == prompt
    [call] = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "stop"


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}])
async def test_any_other_has_the_default_one(rig: RouterRig, fields: dict[str, Any]) -> None:
    _, prompt = await post(rig, "/v1/chat/completions", **fields)

    assert prompt == "[user]hi"


async def test_what_has_no_effect_is_that_which_the_template_in_use_does_not_read(rig: RouterRig) -> None:
    arguments = {"chat_template_kwargs": {"mood": "calm", "enable_thinking": True}}
    without, _ = await post(rig, "/v1/chat/completions", **arguments)
    with_tools, _ = await post(rig, "/v1/chat/completions", tools=[TOOL], **arguments)

    assert without.headers["x-baton-ignored"] == "chat_template_kwargs.enable_thinking"
    assert with_tools.headers["x-baton-ignored"] == "chat_template_kwargs.mood"


async def test_thinking_is_turned_off_in_the_template_in_use(rig: RouterRig) -> None:
    tool = {"name": "stop", "input_schema": {"type": "object"}}
    without, plain = await post(rig, "/v1/messages")
    hidden, _ = await post(rig, "/v1/messages", tools=[tool], tool_choice={"type": "none"})
    _, with_tools = await post(rig, "/v1/messages", tools=[tool])

    assert "x-baton-ignored" not in {**without.headers, **hidden.headers}
    assert (plain, with_tools.endswith("[quick]")) == ("[user]hi", True)
