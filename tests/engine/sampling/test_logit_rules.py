"""Bias, allowed tokens and bad words against their definitions, spelt out token by token."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.messages import SamplingParams
from tests.support.engine.sampler_rig import SamplerRig

VOCAB_SIZE = 10
PROMPT = (1, 2, 3)

Tokens = tuple[int, ...]


def ruled(**rules: Any) -> SamplingParams:
    return SamplingParams(max_tokens=100, **rules)


def may_be_drawn(token: int, rules: SamplingParams, output: Tokens) -> bool:
    """The definition: allowed, and not the end of a bad word whose beginning the output ends with."""
    if rules.allowed_token_ids is not None and token not in rules.allowed_token_ids:
        return False
    return not any((*output, token)[-len(word) :] == word for word in rules.bad_words)


def best_token(logits: list[float], rules: SamplingParams, output: Tokens) -> float:
    """The logit of the most likely token that may be drawn; -inf if there is none."""
    bias = dict(rules.logit_bias)
    values = [value + bias.get(token, 0.0) for token, value in enumerate(logits)]
    return max((value for token, value in enumerate(values) if may_be_drawn(token, rules, output)), default=-math.inf)


token = st.integers(0, VOCAB_SIZE - 1)
words = st.lists(st.lists(token, min_size=1, max_size=4).map(tuple), max_size=6).map(tuple)
all_rules = st.builds(
    ruled,
    logit_bias=st.dictionaries(token, st.integers(-40, 40).map(lambda value: value / 4), max_size=5).map(
        lambda bias: tuple(bias.items())
    ),
    allowed_token_ids=st.none() | st.sets(token, min_size=1).map(tuple),
    bad_words=words,
)


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-5, 5, width=32), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE),
    rows=st.lists(
        st.tuples(st.just(ruled()) | all_rules, st.lists(token, max_size=6).map(tuple)), min_size=1, max_size=4
    ),
)
def test_a_batch_follows_the_definition_row_by_row(
    logits: list[float], rows: list[tuple[SamplingParams, Tokens]]
) -> None:
    rig = SamplerRig()
    for row, (rules, output) in enumerate(rows):
        rig.set(row, rules, prompt=PROMPT, output=output)

    drawn = rig.sample(torch.tensor(logits).repeat(len(rows), 1), list(range(len(rows)))).token_ids.tolist()

    for (rules, output), chosen in zip(rows, drawn, strict=True):
        best = best_token(logits, rules, output)
        if best > -math.inf:
            assert may_be_drawn(chosen, rules, output)
            assert logits[chosen] + dict(rules.logit_bias).get(chosen, 0.0) >= best - 1e-5
        elif rules.allowed_token_ids is not None:
            assert chosen in rules.allowed_token_ids


def test_random_draws_keep_to_the_rules_and_follow_the_bias() -> None:
    rig = SamplerRig()
    rules = ruled(logit_bias=((4, 2.0),), allowed_token_ids=(4, 5, 6), bad_words=((6,),))
    rig.set(0, replace(rules, temperature=1.0, seed=5), prompt=PROMPT)

    draws = rig.sample_at(torch.zeros(VOCAB_SIZE), 0, range(3, 203)).tolist()

    assert set(draws) == {4, 5}
    assert draws.count(4) > 3 * draws.count(5)


def test_bad_words_look_at_the_output_and_not_at_the_prompt() -> None:
    rig = SamplerRig()
    rules = ruled(bad_words=((3, 7),))
    rig.set(0, rules, prompt=(1, 3))
    rig.set(1, rules, prompt=(1,), output=(3,))
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, 7] = 9.0

    assert rig.sample(logits, [0, 1]).token_ids.tolist() == [7, 0]


def test_a_row_that_is_used_again_forgets_its_rules() -> None:
    rig = SamplerRig()
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 7] = 9.0
    rig.set(0, ruled(bad_words=((7,),)), prompt=PROMPT)
    before = rig.sample(logits, [0]).token_ids[0]
    rig.set(0, ruled(allowed_token_ids=(3,)), prompt=PROMPT)
    between = rig.sample(logits, [0]).token_ids[0]
    rig.set(0, ruled(), prompt=PROMPT)

    assert (before, between, rig.sample(logits, [0]).token_ids[0]) == (0, 3, 7)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("allowed", "bad", "expected"),
    [
        ((4, 5), (), {4, 5}),  # only ends are allowed: min_tokens gives way
        ((3, 4), ((3,),), {3}),  # an end and a bad word: the bad word gives way
        ((3,), ((3,),), {3}),  # nothing but a bad word
    ],
)
def test_rules_that_leave_nothing_give_way_in_order(
    temperature: float, allowed: Tokens, bad: tuple[Tokens, ...], expected: set[int]
) -> None:
    rig = SamplerRig()
    rules = ruled(allowed_token_ids=allowed, bad_words=bad)
    rig.set(0, replace(rules, temperature=temperature, seed=1, min_tokens=9, eos_token_ids=(4, 5)), prompt=(1,))

    draws = rig.sample_at(torch.arange(VOCAB_SIZE) * 0.5, 0, range(1, 9)).tolist()

    assert set(draws) <= expected


def test_token_ids_beyond_the_vocabulary_do_no_harm() -> None:
    rig = SamplerRig()
    rules = ruled(logit_bias=((99, 5.0),), allowed_token_ids=(2, 99), bad_words=((99,), (99, 2)))
    rig.set(0, rules, prompt=(1,))

    assert rig.sample(torch.zeros(1, VOCAB_SIZE), [0]).token_ids.tolist() == [2]


def test_host_lays_out_a_byte_for_each_token_of_a_row_that_allows_some() -> None:
    """Every choice of a request may allow nearly all tokens; whenever rows come or go, the batch is laid out anew."""
    num_rows, size = 8, 20_000
    rig = SamplerRig()
    for row in range(num_rows):
        rig.set(row, ruled(allowed_token_ids=tuple(range(size - 1))), prompt=PROMPT)
    logits = torch.zeros(num_rows, size)
    tracemalloc.start()
    try:
        rig.sample(logits, list(range(num_rows)))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 4 * num_rows * size


def test_a_row_that_goes_on_with_its_rules_makes_nothing_anew() -> None:
    """Each step sets the rows of all beams."""
    size = 20_000
    rules = ruled(
        allowed_token_ids=tuple(range(size)), logit_bias=tuple((token, 1.0) for token in range(size)), bad_words=((7,),)
    )
    rig = SamplerRig()
    logits = torch.zeros(2, size)
    for row in (0, 1):
        rig.set(row, rules, prompt=PROMPT)
    rig.sample(logits, [0, 1])
    tracemalloc.start()
    try:
        for row in (0, 1):
            rig.set(row, rules, prompt=PROMPT, output=(5,))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < size
    assert rig.sample(logits, [0, 1]).token_ids.tolist() == [0, 0]


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(all_rules, min_size=2, max_size=5), seed=st.integers(0, 1000))
def test_a_row_draws_the_same_alone_as_in_any_batch(rows: list[SamplingParams], seed: int) -> None:
    rig = SamplerRig()
    for row, rules in enumerate(rows):
        rig.set(row, replace(rules, temperature=1.0, seed=row, presence_penalty=0.5), prompt=PROMPT, output=(5, 5, 6))
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    together = rig.sample(logits, list(range(len(rows)))).token_ids.tolist()

    order = list(reversed(range(len(rows))))
    assert [rig.sample(logits[row : row + 1], [row]).token_ids[0] for row in range(len(rows))] == together
    assert rig.sample(logits[order], order).token_ids.tolist() == [together[row] for row in order]
