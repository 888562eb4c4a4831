"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router.text.tokenizer import Tokenizer
from tests.support.router.router_rig import router_rig
from tests.support.router.router_tokenizer import BOS, EOS, byte_level_tokenizer, write_model_dir

PICTURE = "<|picture|>"


async def test_text_goes_to_tokens_and_back(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        tokens = (await rig.client.post("/tokenize", json={"prompt": "hello 🙂", "return_token_strs": True})).json()
        text = (await rig.client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()

        assert tokens["tokens"] == Tokenizer.load(model_dir).encode("hello 🙂")
        assert (tokens["count"], len(tokens["token_strs"]), tokens["max_model_len"]) == (
            len(tokens["tokens"]),
            len(tokens["tokens"]),
            512,
        )
        assert text == {"prompt": "hello 🙂"}


async def test_conversation_is_rendered_as_for_an_answer(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        messages = [{"role": "user", "content": "hi"}]
        tokens = (await rig.client.post("/tokenize", json={"messages": messages})).json()["tokens"]
        text = (await rig.client.post("/detokenize", json={"tokens": tokens})).json()["prompt"]

        assert text == f"{BOS}[user] hi{EOS}\n[assistant] "


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a", "other": 1}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {"tokens": [2**31]}),
    ],
)
async def test_bad_bodies_are_refused(model_dir: Path, path: str, body: dict[str, object]) -> None:
    async with router_rig(model_dir) as rig:
        response = await rig.client.post(path, json=body)

        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_ids_beyond_the_vocabulary_are_refused(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        response = await rig.client.post("/detokenize", json={"tokens": [5, 400]})

        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "tokens")
        assert "vocabulary of 400 tokens" in error["message"]


async def test_load_counts_what_is_in_progress(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        assert (await rig.client.get("/load")).json() == {"server_load": 0, "num_waiting": 0}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": f"see {PICTURE} there"}, "prompt"),
        ("/v1/completions", {"prompt": ["fine", PICTURE]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PICTURE}]}, "messages"),
    ],
)
async def test_tokens_of_a_text_that_the_model_has_not_are_refused(
    tmp_path: Path, path: str, body: dict[str, Any], param: str
) -> None:
    """Tokenizers have added tokens behind the embeddings, as of a variant of the model that sees pictures."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([f"<unused{number}>" for number in range(500 - tokenizer.get_vocab_size())])
    tokenizer.add_special_tokens([PICTURE])
    async with router_rig(write_model_dir(tmp_path, tokenizer=tokenizer)) as rig:
        response = await rig.client.post(path, json={**body, "max_tokens": 2})
        harmless = await rig.complete("hello", max_tokens=1, bad_words=[f"a {PICTURE}", PICTURE, "no"])

        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "invalid_parameter", param)
        assert f"token id 500 ({PICTURE}) is not in the model's vocabulary of 400 tokens" in error["message"]
        assert harmless.status_code == 200
        (request,) = rig.prefill[0].seen
        assert request.sampling.bad_words
        assert all(token_id < 400 for word in request.sampling.bad_words for token_id in word), "no others can come"
