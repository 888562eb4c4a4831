"""The echo of a prompt: the text as it was sent, and its tokens' places in that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.router.router_rig import completion_text, events, router_rig
from tests.support.router.router_tokenizer import BOS, EOS, byte_level_tokenizer, write_model_dir

SPECIAL = f"hello{EOS}\n world"


@pytest.fixture(params=[False, True], ids=["plain", "with bos"])
def any_model_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_model_dir(tmp_path, tokenizer=byte_level_tokenizer(adds_bos=request.param))


@pytest.mark.parametrize("prompt", ["hello", SPECIAL, f"{BOS}x", "\u65e5\u672c \U0001f642"])
async def test_text_is_echoed_as_it_was_sent(any_model_dir: Path, prompt: str) -> None:
    body: dict[str, Any] = {"max_tokens": 2, "echo": True, "logprobs": 1, "seed": 1, "return_token_ids": True}
    async with router_rig(any_model_dir) as rig:
        choice = (await rig.complete(prompt, **body)).json()["choices"][0]
        chunks = events(await rig.complete(prompt, **body, stream=True))

        assert choice["text"].startswith(prompt)
        assert completion_text(chunks) == choice["text"]
        offsets = choice["logprobs"]["text_offset"]
        num_prompt_tokens = len(choice["prompt_token_ids"])
        assert len(offsets) == num_prompt_tokens + 2
        assert offsets == sorted(offsets)
        assert offsets[num_prompt_tokens] == len(prompt)


async def test_places_of_a_texts_tokens_are_where_they_are_spelled(any_model_dir: Path) -> None:
    async with router_rig(any_model_dir) as rig:
        body = {"max_tokens": 0, "echo": True, "logprobs": 0, "return_token_ids": True}
        choice = (await rig.complete(SPECIAL, **body)).json()["choices"][0]

        ids, offsets = choice["prompt_token_ids"], choice["logprobs"]["text_offset"]
        end = rig.service.tokenizer.token_id(EOS)
        assert choice["text"] == SPECIAL
        assert offsets[ids.index(end)] == SPECIAL.index(EOS)
        assert offsets[ids.index(end) + 1] == SPECIAL.index("\n")


async def test_token_ids_are_echoed_with_their_special_tokens(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        ids = rig.service.tokenizer.encode(SPECIAL)
        choice = (await rig.complete(ids, max_tokens=0, echo=True, logprobs=0)).json()["choices"][0]

        assert choice["text"] == SPECIAL
        assert choice["logprobs"]["text_offset"][-1] < len(SPECIAL)


async def test_truncated_text_is_echoed_as_far_as_it_was_sent(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        ids = rig.service.tokenizer.encode(SPECIAL)
        body = {"max_tokens": 0, "echo": True, "truncate_prompt_tokens": len(ids) - 1}
        choice = (await rig.complete(SPECIAL, **body)).json()["choices"][0]

        assert choice["text"] == rig.service.tokenizer.decode(ids[1:], skip_special_tokens=False)
