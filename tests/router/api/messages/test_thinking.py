"""Whether the model thinks: at /v1/messages it does where that was asked for, whatever its template does by default."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from tests.support.router.router_rig import RouterRig, router_rig
from tests.support.router.router_tokenizer import byte_level_tokenizer, write_model_dir

QWEN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
)
"""Thinks unless it is told not to."""

THINKING: dict[str, Any] = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[RouterRig]:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(name, special=False) for name in ("<think>", "</think>")])
    path = write_model_dir(tmp_path / "model", tokenizer=tokenizer, config={"chat_template": QWEN})
    async with router_rig(path) as rig:
        yield rig


async def thinks(rig: RouterRig, **fields: Any) -> bool:
    """Whether the prompt leaves it to the model to think; the count of its tokens says the same."""
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    answer = await rig.client.post("/v1/messages", json={**body, "max_tokens": 2})
    counted = await rig.client.post("/v1/messages/count_tokens", json=body)
    ids = rig.prefill[0].seen[-1].prompt_token_ids
    assert "x-baton-ignored" not in answer.headers
    assert "x-baton-ignored" not in counted.headers
    assert counted.json()["input_tokens"] == len(ids)
    return "<think></think>" not in rig.service.tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("fields", "does"),
    [
        ({}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": THINKING}, True),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
async def test_model_thinks_where_that_was_asked_for(rig: RouterRig, fields: dict[str, Any], does: bool) -> None:
    assert await thinks(rig, **fields) is does


async def test_template_that_reads_nothing_of_thinking_is_told_nothing(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        assert await thinks(rig) is True
