"""The cost of bad words: each word costs by its own length, whatever other words there are."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.messages import SamplingParams
from engine.sampling.processors.bad_words import BadWords
from engine.sampling.processors.processor import BAD_WORD
from engine.sampling.token_history import TokenHistory

NUM_ROWS = 8
VOCAB_SIZE = 64
NUM_PROMPT = 2

Word = tuple[int, ...]


def history_of(outputs: list[Word], *, width: int) -> tuple[TokenHistory, np.ndarray]:
    """The outputs behind prompts of token 1, and the positions of their next tokens."""
    history = TokenHistory(
        token_ids=np.ones((len(outputs), width), dtype=np.int32),
        num_prompt_tokens=np.full(len(outputs), NUM_PROMPT, dtype=np.int32),
    )
    for row, output in enumerate(outputs):
        history.token_ids[row, NUM_PROMPT : NUM_PROMPT + len(output)] = output
    return history, np.array([NUM_PROMPT + len(output) for output in outputs], dtype=np.int32)


def banned(words: list[tuple[Word, ...]], outputs: list[Word], rows: list[int]) -> list[set[int]]:
    """The tokens that are masked in each row of a batch."""
    history, positions = history_of(outputs, width=NUM_PROMPT + max(map(len, outputs)) + 1)
    processor = BadWords(len(words))
    for row, row_words in enumerate(words):
        processor.set(row, SamplingParams(max_tokens=1, bad_words=row_words), num_prompt_tokens=NUM_PROMPT)
    logits = torch.zeros(len(rows), VOCAB_SIZE)
    index = np.array(rows, dtype=np.int32)
    processor.apply(logits, index, positions[index], history)
    return [set(torch.nonzero(row == BAD_WORD).flatten().tolist()) for row in logits]


def distinct_words(number: int) -> tuple[Word, ...]:
    """So many words of three tokens."""
    return tuple((1 + index % 40, 1 + index // 40, 2) for index in range(number))


def test_one_long_word_costs_no_more_than_its_own_tokens() -> None:
    words = distinct_words(2_046)
    processor = BadWords(NUM_ROWS)
    for row in range(NUM_ROWS):
        longest = ((1,) * 3_000,) if row == 0 else ((1,),)
        sampling = SamplingParams(max_tokens=1, bad_words=(*words, *longest))
        processor.set(row, sampling, num_prompt_tokens=NUM_PROMPT)
    history, positions = history_of([(1,) * 4_000] * NUM_ROWS, width=4_010)
    logits = torch.zeros(NUM_ROWS, VOCAB_SIZE)

    tracemalloc.start()
    try:
        processor.apply(logits, np.arange(NUM_ROWS, dtype=np.int32), positions, history)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    num_tokens = NUM_ROWS * 3 * len(words) + 3_000
    assert peak < 100 * num_tokens
    assert logits[0, 1] == BAD_WORD


letters = st.integers(1, 2)
row_words = st.lists(
    st.lists(letters, min_size=1, max_size=3).map(tuple) | st.lists(letters, min_size=8, max_size=20).map(tuple),
    max_size=8,
).map(tuple)
output = st.lists(letters, max_size=24).map(tuple)


@settings(deadline=None)
@given(data=st.data(), rows=st.lists(st.tuples(row_words, output), min_size=1, max_size=4))
def test_words_of_any_lengths_end_where_the_definition_says(
    data: st.DataObject, rows: list[tuple[tuple[Word, ...], Word]]
) -> None:
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=6))

    found = banned([words for words, _ in rows], [output for _, output in rows], order)

    assert found == [
        {word[-1] for word in words if (*output, word[-1])[-len(word) :] == word}
        for words, output in (rows[row] for row in order)
    ]


@pytest.mark.parametrize("words", [(), ((VOCAB_SIZE,), (1, VOCAB_SIZE + 1))])
def test_words_that_cannot_end_mask_nothing(words: tuple[Word, ...]) -> None:
    assert banned([words, ((5,),)], [(1, 1), (1, 1)], [0, 1]) == [set(), {5}]
