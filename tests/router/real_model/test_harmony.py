"""A model that uses harmony ends its calls and its answers with tokens of their own, both of which end the output."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from router.tools.formats.harmony import CALL, CHANNEL, END, MESSAGE, RETURN, HarmonyFormat
from tests.support.cluster.served_checkpoint import byte_tokenizer, make_served_checkpoint
from tests.support.router.model_router import ModelRouter, model_router

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}"
)


def harmony_tokenizer() -> Tokenizer:
    """A tokenizer of bytes, with a token for each marker."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in HarmonyFormat.markers])
    return tokenizer


IDS = harmony_tokenizer().get_vocab()
TOOL = {
    "type": "function",
    "function": {
        "name": "set",
        "parameters": {"type": "object", "properties": {"unit": {"enum": ["k", "c"]}}, "required": ["unit"]},
    },
}
ASK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [TOOL],
    "temperature": 0,
}


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[ModelRouter]:
    path = make_served_checkpoint(tmp_path / "model", vocab_size=len(IDS))
    harmony_tokenizer().save(str(path / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": RETURN}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [IDS[RETURN], IDS[CALL]]}))
    async with model_router(path) as router:
        yield router


async def ask(live: ModelRouter, favoured: dict[int, float], **fields: Any) -> tuple[Any, list[int]]:
    """The answer of a model that says what is favoured wherever it may, and its tokens."""
    extra = {"return_token_ids": True, **fields.pop("extra_body", {})}
    bias = {str(token_id): value for token_id, value in favoured.items()}
    answer: Any = await live.client.chat.completions.create(
        **ASK, **{"max_tokens": 200, **fields}, logit_bias=bias, extra_body=extra
    )
    return answer.choices[0], answer.choices[0].token_ids


@pytest.mark.parametrize("end", [CALL, RETURN])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set"}}])
async def test_a_call_ends_the_answer(live: ModelRouter, end: str, choice: Any) -> None:
    answer, token_ids = await ask(live, {IDS[end]: 100, IDS[CHANNEL]: 90}, tool_choice=choice)

    [call] = answer.message.tool_calls
    assert (call.function.name, answer.finish_reason, answer.message.content) == ("set", "tool_calls", None)
    assert json.loads(call.function.arguments)["unit"] in {"k", "c"}
    assert [token for token in token_ids if token in (IDS[CALL], IDS[RETURN])] == [token_ids[-1]] == [IDS[end]]


async def test_analysis_is_reasoning_and_a_preamble_is_content(live: ModelRouter) -> None:
    favoured: dict[int, float] = {IDS[CHANNEL]: 100, IDS[MESSAGE]: 100, IDS["a"]: 50, IDS[RETURN]: 100}
    thought = {**favoured, IDS[END]: 40}
    budget = {"thinking_token_budget": 5}
    final, _ = await ask(live, {**favoured, IDS["f"]: 80}, extra_body={"min_tokens": 9})
    thinking, _ = await ask(live, thought, extra_body=budget, max_tokens=40)
    preamble, _ = await ask(live, {**thought, IDS["c"]: 80}, extra_body=budget, max_tokens=20)

    assert (set(final.message.content), final.finish_reason) == ({"f"}, "stop")
    assert (thinking.message.reasoning_content[:5], thinking.message.content) == ("aaaaa", "")
    assert preamble.message.content == "ccccc"
    assert preamble.message.reasoning_content is None
