"""A prompt's tokens, packed once: what they equal, and what it costs to bring them to an engine's rows."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from engine.scheduler.requests.request import Request

INT32 = st.integers(min_value=-(2**31), max_value=2**31 - 1)


def request_of(prompt: TokenIds, *output: int) -> GenerateRequest:
    return GenerateRequest(
        request_id="a", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=4), output_token_ids=output
    )


@given(numbers=st.lists(INT32))
def test_packed_ids_are_the_sequence_that_was_packed(numbers: list[int]) -> None:
    packed = TokenIds.of(numbers)

    assert list(packed) == packed.tolist() == packed.array.tolist() == numbers
    assert (len(packed), packed == tuple(numbers), hash(packed)) == (len(numbers), True, hash(tuple(numbers)))
    assert packed == pickle.loads(pickle.dumps(packed)) == TokenIds.of(packed)
    assert packed[1:-1] == numbers[1:-1]
    assert [packed[index] for index in range(len(packed))] == numbers


def test_different_ids_are_different() -> None:
    assert TokenIds.of((1, 2)) != TokenIds.of((2, 1))
    assert TokenIds.of((1, 2)) != (1, 3)


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
def test_what_is_no_int32_is_refused(number: int) -> None:
    with pytest.raises(Exception, match="format requires"):
        TokenIds.of([number])


def test_prompt_reaches_the_scheduler_without_another_copy() -> None:
    prompt = TokenIds.of(range(8))
    sent = pickle.loads(pickle.dumps(request_of(prompt)))

    request = Request(sent, arrival_index=0, full_limit=12, queued_at_s=0.0)

    assert np.shares_memory(request.token_ids, sent.prompt_token_ids.array)
    assert not request.token_ids.flags.writeable


def test_output_so_far_follows_the_prompt() -> None:
    request = Request(request_of(TokenIds.of((1, 2)), 3, 4), arrival_index=0, full_limit=12, queued_at_s=0.0)

    assert request.token_ids.tolist() == [1, 2, 3, 4]
    assert request.num_prompt_tokens == 2
