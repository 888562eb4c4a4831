"""``bad_words`` become tokens in the router: in which forms they are looked for, and how many tokens they may have."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.router.router_rig import RouterRig, router_rig

CYRILLIC = "ж"
"""It has two tokens with the tokenizer of these tests; " ж" has three."""


@pytest.fixture
async def rig(model_dir: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(model_dir) as rig:
        yield rig


async def refusal(rig: RouterRig, words: list[str]) -> dict[str, Any]:
    """The error of a request with these bad words, which must not reach a worker."""
    response = await rig.client.post("/v1/completions", json={"prompt": "hi", "bad_words": words})
    assert response.status_code == 400
    assert rig.prefill[0].seen == []
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize(
    ("word", "forms"),
    [
        ("good", {"good", " good"}),
        (" good", {"good", " good"}),
        ("\n", {"\n", " \n"}),
        ("\n#", {"\n#", " \n#"}),
        (" ", {" "}),
        ("  ", {"  "}),
    ],
)
async def test_a_word_is_looked_for_with_and_without_a_space_before_it(
    rig: RouterRig, word: str, forms: set[str]
) -> None:
    """Other white space is part of the word: without line breaks an answer may still have spaces and signs."""
    response = await rig.client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1, "bad_words": [word]})

    assert response.status_code == 200
    (request,) = rig.prefill[0].seen
    tokens = rig.service.tokenizer.encode_all(sorted(forms), add_special_tokens=False)
    assert set(request.sampling.bad_words) == {tuple(ids) for ids in tokens}


async def test_a_word_of_too_many_tokens_is_named_with_the_limit(rig: RouterRig) -> None:
    error = await refusal(rig, ["good", CYRILLIC * 500])

    assert error["param"] == "bad_words"
    assert f"the word '{CYRILLIC * 40}' has 1000 tokens, the limit is 64" in error["message"]


async def test_words_of_too_many_tokens_together_are_refused(rig: RouterRig) -> None:
    words = [f"{CYRILLIC * 8}{number:03}" for number in range(400)]

    error = await refusal(rig, words)

    assert error["param"] == "bad_words"
    assert "400 words" in error["message"]
    assert "the limit is 8192" in error["message"]
    assert repr(words[0]) in error["message"]


async def test_as_many_words_as_a_body_may_have_are_served_where_they_are_short(rig: RouterRig) -> None:
    letters = "abcdefghijklmnopqrstuvwxyzABCDEF"
    words = [first + second for first in letters for second in letters]
    words[-1] = CYRILLIC * 31

    response = await rig.client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1, "bad_words": words})

    assert len(words) == 1024
    assert response.status_code == 200
