"""Rows of the matrix joined at random, several at the same time, along every path and through every fault.

Each answer is that of one engine which nobody else asks: what a request asks for shows in no answer beside it.
Little KV makes them wait for each other, and take each other's place. `BATON_COMBINATIONS=10 make test
TESTS=tests/parity/test_combinations.py` draws ten times as many.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.parity.columns import COLUMNS, ONE_ENGINE
from tests.parity.features import FEATURES, LETTERS
from tests.support.parity.answers import Answer, assert_same
from tests.support.parity.feature import TEXT, Feature
from tests.support.parity.setup import FULL, LATENTS, PARTLY_WINDOWED
from tests.support.parity.world import World, world

NUM_DRAWN = int(os.environ.get("BATON_COMBINATIONS", "1"))
NUM_BESIDE = 4
FEW_BLOCKS = 40
MODELS = {"full": FULL, "partly windowed": PARTLY_WINDOWED, "latents": LATENTS}
BY_NAME = {feature.name: feature for feature in FEATURES}

JOINED: tuple[Mapping[str, Any], ...] = (
    {"logprobs": 3},
    {"prompt_logprobs": 2, "stream": False, "stream_options": None},
    {"n": 2},
    {"prompt_logprobs": None, "stream": True, "stream_options": {"include_usage": True}},
    {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"presence_penalty": -1.0},
    {"no_repeat_ngram_size": 2},
    {"logit_bias": {"70": 4, "80": 4}},
    {"bad_words": ["dd", "de", "eee"]},
    {"allowed_token_ids": LETTERS},
    {"min_tokens": 8},
    {"ignore_eos": True},
    {"stop": ["zz", "a"]},
    {"stop_token_ids": [75, 90, 110]},
    {"structured_outputs": {"regex": "[a-h]{2,20}"}},
    {"priority": -2},
    {"priority": 2, "cache_salt": "mine"},
    {"max_tokens": 40},
    {"prompt": TEXT[:50] * 3},
    {"prompt": [TEXT[:60], TEXT[9:]]},
)
"""What any request may ask for in addition to all others."""

DISTURBED = ("greedy", "json_schema", "several prompts", "stream", "chat", "repetition penalty")
"""One of these is requested as its column wants it, while all others run: columns check what rows must show."""

TAKES_ONE = ("moved while it waits", "replaced source", "lost kv prefilled again")
"""Columns whose faults are for one request that is alone."""


def drawn_row(draw: random.Random, *, may_be_sampled: bool) -> Feature:
    """A row of the matrix, or a request that joins several things."""
    if draw.random() < 0.25:
        return BY_NAME[draw.choice(["chat", "stream of tools", "beam search", "several prompts", "stream of a chat"])]
    fields: dict[str, Any] = {}
    if may_be_sampled and draw.random() < 0.5:
        fields |= {"temperature": draw.choice([0.7, 1.3]), "seed": draw.randrange(1000), "top_k": draw.choice([0, 20])}
    for part in draw.sample(JOINED, draw.randint(1, 6)):
        fields |= part
    return Feature(name="drawn", fields=fields)


async def ask_all(made: World, column: str, rows: list[Feature]) -> list[Answer]:
    """The answers to rows that are asked at the same time; a column's action disturbs them."""
    others = [asyncio.create_task(made.ask(row)) for row in rows[1:]]
    first = await COLUMNS[column].ask(made, rows[0])
    made.let_go()
    return [first, *await asyncio.gather(*others)]


@pytest.mark.behaviour("I1")
@pytest.mark.parametrize("number", range(NUM_DRAWN))
@pytest.mark.parametrize("column", [name for name in COLUMNS if name not in TAKES_ONE])
async def test_requests_that_share_workers_are_answered_as_alone(tmp_path: Path, column: str, number: int) -> None:
    """With drafts, no row samples randomly: several tokens per step are rounded differently from one, which could
    change a draw.
    """
    draw = random.Random(f"{column} {number}")
    path = MODELS[draw.choice(list(MODELS))].write(tmp_path / "model")
    setup = COLUMNS[column].setup
    setup = replace(setup, num_blocks=min(setup.num_blocks, FEW_BLOCKS))
    has_drafts = setup.is_own_draft or setup.drafting is not None
    rows = [BY_NAME[draw.choice(DISTURBED)]]
    rows += [drawn_row(draw, may_be_sampled=not has_drafts) for _ in range(NUM_BESIDE)]

    async with world(path, ONE_ENGINE.setup) as alone:
        expected = [await alone.ask(row) for row in rows]
    async with world(path, setup) as made:
        answers = await ask_all(made, column, rows)
        await made.rest()
        for name in set(made.engines) - made.killed:
            assert made.count(f"{name} num_integrity_failures") == 0

    for row, answer, wanted in zip(rows, answers, expected, strict=True):
        assert_same(answer, wanted, where=f"answer to {row.fields}")
