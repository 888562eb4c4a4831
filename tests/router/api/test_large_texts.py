"""Large texts: they are tokenized beside the event loop, and not at all when they cannot be accepted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from router.text.tokenizer import Tokenizer
from tests.support.router.router_rig import RouterRig, router_rig

LONG = "the quick brown fox " * 1000


class GatedTokenizer(Tokenizer):
    """Holds every text back until ``gate`` is set, and counts them."""

    gate: threading.Event
    texts: list[str]

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Like the tokenizer, but later."""
        self.texts.extend(texts)
        assert self.gate.wait(120)
        return super().encode_all(texts, add_special_tokens=add_special_tokens)


@pytest.fixture
async def rig(model_dir: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(model_dir) as rig:
        tokenizer = GatedTokenizer.load(model_dir)
        assert isinstance(tokenizer, GatedTokenizer)
        tokenizer.gate = threading.Event()
        tokenizer.texts = []
        rig.service.tokenizer = tokenizer
        yield rig


def gated(rig: RouterRig) -> GatedTokenizer:
    assert isinstance(rig.service.tokenizer, GatedTokenizer)
    return rig.service.tokenizer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": LONG}),
        ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 8, "max_tokens": 2}),
        ("/v1/completions", {"prompt": ["a few words " * 40] * 20, "max_tokens": 1}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": LONG}], "truncate_prompt_tokens": 8, "max_tokens": 2},
        ),
    ],
)
async def test_router_answers_others_while_large_texts_are_tokenized(
    rig: RouterRig, path: str, body: dict[str, Any]
) -> None:
    asked = asyncio.create_task(rig.client.post(path, json=body))
    while not gated(rig).texts:  # noqa: ASYNC110 (until the tokenizer was called, in whichever thread)
        await asyncio.sleep(0)

    health = await rig.client.get("/health")
    gated(rig).gate.set()

    assert health.status_code == 200
    assert (await asked).status_code == 200


async def test_batch_that_is_too_large_is_refused_before_it_is_tokenized(rig: RouterRig) -> None:
    response = await rig.client.post("/v1/completions", json={"prompt": ["hi"] * 65, "n": 2})

    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    assert "130" in response.json()["error"]["message"]
    assert gated(rig).texts == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(rig: RouterRig, path: str) -> None:
    key, value = ("prompt", LONG) if "chat" not in path else ("messages", [{"role": "user", "content": LONG}])

    response = await rig.client.post(path, json={key: value})

    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", key)
    assert "at least" in error["message"]
    assert "512" in error["message"]
    assert gated(rig).texts == []
