"""Predictions of the benchmark of draft tokens: answers with edits, which are followed again after each edit."""

from __future__ import annotations

import random

from benchmarks.edited_answers import EDIT_EVERY, before_edits
from engine.contract.prediction.follower import PredictionFollower
from engine.contract.token_ids import TokenIds


def test_an_answer_is_followed_along_what_it_was_before_its_edits() -> None:
    answer = random.Random(1).sample(range(1000), 8 * EDIT_EVERY)
    follower, num_foreseen = PredictionFollower(TokenIds.of(before_edits(answer))), 0
    for token in answer:
        num_foreseen += follower.expected(1).tolist() == [token]
        follower.follow([token])

    num_edits = len(answer) // EDIT_EVERY - 1
    assert before_edits(answer) != answer
    assert len(answer) - 2 * num_edits <= num_foreseen < len(answer)
