"""Stop strings beside ``min_tokens``: none ends a text that is shorter."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.text.tokenizer import Tokenizer
from tests.support.router.fake_workers import NextToken, scripted
from tests.support.router.router_rig import router_rig


def letters(model_dir: Path, text: str) -> NextToken:
    """One token for each letter, over and over."""
    tokenizer = Tokenizer.load(model_dir)
    return scripted([tokenizer.encode(letter)[0] for letter in text])


@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("tokens_per_step", [1, 3, 8])
async def test_no_stop_string_ends_the_text_before_min_tokens(
    model_dir: Path, tokens_per_step: int, logprobs: int | None
) -> None:
    async with router_rig(model_dir, next_token=letters(model_dir, "eabe"), tokens_per_step=tokens_per_step) as rig:
        body = (await rig.complete("x", max_tokens=20, min_tokens=5, stop=["e"], logprobs=logprobs)).json()

        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("eabeeab", "stop", "e")


async def test_stop_string_may_begin_before_min_tokens_and_end_after(model_dir: Path) -> None:
    async with router_rig(model_dir, next_token=letters(model_dir, "abcd")) as rig:
        choice = (await rig.complete("x", max_tokens=20, min_tokens=2, stop=["bc"])).json()["choices"][0]

        assert (choice["text"], choice["stop_reason"]) == ("a", "bc")


async def test_text_that_ends_with_min_tokens_is_whole(model_dir: Path) -> None:
    async with router_rig(model_dir, next_token=letters(model_dir, "aeae")) as rig:
        choice = (await rig.complete("x", max_tokens=4, min_tokens=4, stop=["e", "aeaef"])).json()["choices"][0]

        assert (choice["text"], choice["finish_reason"]) == ("aeae", "length")


async def test_min_tokens_are_counted_over_workers(model_dir: Path) -> None:
    async with router_rig(model_dir, next_token=letters(model_dir, "eabe"), num_decode=4) as rig:
        for replica in rig.decode.replicas.values():
            replica.die_after_tokens = 3
        choice = (await rig.complete("x", max_tokens=20, min_tokens=5, stop=["e"])).json()["choices"][0]

        assert (choice["text"], choice["stop_reason"]) == ("eabeeab", "e")
        assert rig.service.counters.num_migrations >= 2
