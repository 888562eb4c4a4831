"""An answer with thinking, text and a call, sent back to a model whose template takes only one text beside a call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.router.fake_workers import scripted
from tests.support.router.router_rig import RouterRig, router_rig
from tests.support.router.router_tokenizer import EOS, byte_level_tokenizer, write_model_dir

HARMONY = (
    "{% for message in messages %}{% if 'tool_calls' in message %}"
    "{% if message.content and message.thinking %}"
    '{{ raise_exception("Cannot pass both content and thinking in an assistant message with tool calls!") }}'
    "{% elif message.content %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}"
    "{% elif message.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
    "{% endif %}"
    "{{ '<|start|>assistant to=functions.' + message.tool_calls[0].function.name + '<|channel|>commentary json' }}"
    "{{ '<|message|>' + message.tool_calls[0].function.arguments | tojson + '<|call|>' }}"
    "{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% for tool in tools or [] %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""How gpt-oss's own template renders an assistant's turn with calls."""

SEPARATE = HARMONY.replace(
    '{{ raise_exception("Cannot pass both content and thinking in an assistant message with tool calls!") }}',
    "[{{ message.thinking }}][{{ message.content }}]",
)
"""A template that has a place for each."""

CALL = {"name": "stop", "arguments": "{}"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "I stop it.",
                "reasoning": "Too long.",
                "reasoning_content": "Too long.",
                "tool_calls": [{"id": "c1", "type": "function", "function": CALL}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
        ]
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Too long."}]},
            {"role": "assistant", "content": "I stop it."},
            {"type": "function_call", "call_id": "c1", **CALL},
            {"type": "function_call_output", "call_id": "c1", "output": "done"},
        ]
    },
    "/v1/messages": {
        "max_tokens": 5,
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Too long.", "signature": ""},
                    {"type": "text", "text": "I stop it."},
                    {"type": "tool_use", "id": "c1", "name": "stop", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "done"}]},
        ],
    },
}


async def prompt_of(path: Path, template: str, endpoint: str) -> str:
    """The prompt that a worker gets; nothing of the body is said to be ignored."""
    write_model_dir(path, config={"chat_template": template})
    end = byte_level_tokenizer().encode(EOS).ids
    async with router_rig(path, next_token=scripted(end)) as rig:
        answer = await rig.client.post(endpoint, json=BODIES[endpoint])
        assert answer.status_code == 200, answer.text
        assert "x-baton-ignored" not in answer.headers
        return rig.service.tokenizer.decode(rig.prefill[0].seen[-1].prompt_token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("endpoint", BODIES)
async def test_thinking_and_text_are_one_where_the_template_takes_one_beside_a_call(
    tmp_path: Path, endpoint: str
) -> None:
    prompt = await prompt_of(tmp_path / "model", HARMONY, endpoint)

    assert (
        "<|start|>assistant<|channel|>analysis<|message|>Too long.\nI stop it.<|end|>"
        "<|start|>assistant to=functions.stop<|channel|>commentary json<|message|>{}<|call|>"
    ) in prompt


@pytest.mark.parametrize("endpoint", BODIES)
async def test_thinking_and_text_stay_apart_where_the_template_takes_both(tmp_path: Path, endpoint: str) -> None:
    prompt = await prompt_of(tmp_path / "model", SEPARATE, endpoint)

    assert "[Too long.][I stop it.]<|start|>assistant to=functions.stop" in prompt


@pytest.fixture
async def harmony(tmp_path: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(write_model_dir(tmp_path / "model", config={"chat_template": HARMONY})) as rig:
        yield rig


@pytest.mark.parametrize(("field", "text"), [("content", "I stop it."), ("reasoning", "Too long.")])
async def test_one_text_beside_a_call_is_given_as_it_is(harmony: RouterRig, field: str, text: str) -> None:
    user, turn, result = BODIES["/v1/chat/completions"]["messages"]
    called = {"role": "assistant", "content": None, "tool_calls": turn["tool_calls"], field: text}
    answer = await harmony.client.post("/tokenize", json={"messages": [user, called, result]})

    prompt = harmony.service.tokenizer.decode(answer.json()["tokens"], skip_special_tokens=False)
    assert f"<|channel|>analysis<|message|>{text}<|end|>" in prompt
