"""Requests with token ids that the model does not have: they are refused, and others are not affected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.build import build_engine
from engine.contract.errors import UnknownTokenError
from engine.frontend.offline import generate
from tests.support.engine.engine_config import small_engine_config
from tests.support.engine.requests import greedy_request


def test_tokens_behind_the_vocabulary_do_not_end_the_engine(served_model: Path) -> None:
    built = build_engine(small_engine_config(served_model))
    vocab_size = built.facts.vocab_size
    last = [1, vocab_size - 1]
    for prompt, output in (([1, vocab_size], ()), ([-1, 2], ()), ([1, 2], (vocab_size,))):
        request = replace(greedy_request("bad", prompt, max_tokens=4), output_token_ids=output)
        with pytest.raises(UnknownTokenError, match=f"not in the model's vocabulary of {vocab_size} tokens"):
            built.core.add_request(request)

    outputs = generate(built.core, [greedy_request("good", last, max_tokens=4)])

    assert len(outputs["good"]) == 4
    built.core.close()
