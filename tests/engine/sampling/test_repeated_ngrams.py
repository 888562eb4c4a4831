"""``no_repeat_ngram_size`` masks what transformers masks, and gives way as bad words do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoRepeatNGramLogitsProcessor

from engine.contract.messages import SamplingParams
from tests.support.engine.sampler_rig import SamplerRig

VOCAB_SIZE = 5
SIZES = st.integers(0, 6)
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40).map(tuple)

Tokens = tuple[int, ...]


def without_repeats(size: int, **rules: object) -> SamplingParams:
    return SamplingParams(max_tokens=100, no_repeat_ngram_size=size, **rules)  # type: ignore[arg-type]


def masked_by_transformers(logits: torch.Tensor, tokens: Tokens, size: int) -> torch.Tensor:
    if not size:
        return logits
    changed: torch.Tensor = NoRepeatNGramLogitsProcessor(size)(torch.tensor([tokens]), logits[None].clone())[0]
    return changed


@settings(max_examples=300, deadline=None)
@given(rows=st.lists(st.tuples(SIZES, TOKENS, TOKENS), min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_a_batch_is_masked_as_transformers_masks_each_row(rows: list[tuple[int, Tokens, Tokens]], seed: int) -> None:
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    rig = SamplerRig()
    for row, (size, prompt, output) in enumerate(rows):
        rig.set(row, without_repeats(size), prompt=prompt, output=output)

    drawn = rig.sample(logits, list(range(len(rows)))).token_ids.tolist()

    for (size, prompt, output), of_row, token in zip(rows, logits, drawn, strict=True):
        masked = masked_by_transformers(of_row, prompt + output, size)
        assert masked[token] == masked.max()  # if nothing is left, all tokens give way


def test_the_first_token_of_an_output_does_not_repeat_the_prompt() -> None:
    rig = SamplerRig()
    rig.set(0, without_repeats(3), prompt=(1, 2, 3, 1, 2))
    rig.set(1, without_repeats(4), prompt=(1, 2, 3, 1, 2))
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, 3] = 9.0

    assert rig.sample(logits, [0, 1]).token_ids.tolist() == [0, 3]


def test_no_draw_repeats() -> None:
    rig = SamplerRig()
    rig.set(0, without_repeats(1, temperature=5.0, seed=3), prompt=(0, 2, 3))

    assert set(rig.sample_at(torch.zeros(VOCAB_SIZE), 0, range(3, 4)).tolist()) <= {1, 4}


@pytest.mark.parametrize(("allowed", "expected"), [((2, 3), 3), ((2,), 2)])
def test_where_nothing_else_is_allowed_it_gives_way(allowed: Tokens, expected: int) -> None:
    rig = SamplerRig()
    rig.set(0, without_repeats(2, allowed_token_ids=allowed), prompt=(1, 2, 1))
    logits = torch.tensor([[0.0, 0.0, 9.0, 1.0, 0.0]])

    assert rig.sample(logits, [0]).token_ids.tolist() == [expected]


def test_a_row_that_is_used_again_forgets_it() -> None:
    rig = SamplerRig()
    logits = torch.tensor([[0.0, 0.0, 9.0, 1.0, 0.0]])
    rig.set(0, without_repeats(2), prompt=(1, 2, 1))
    before = rig.sample(logits, [0]).token_ids.tolist()
    rig.set(0, without_repeats(0), prompt=(1, 2, 1))

    assert (before, rig.sample(logits, [0]).token_ids.tolist()) == ([3], [2])
