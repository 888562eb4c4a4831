"""The compiled search for the most likely token, beside torch's."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from engine.sampling.most_likely import MostLikely

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = (float("inf"), float("-inf"), 0.0, -0.0, 1.0, -1.0, 1e-40)


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    rows=st.integers(1, 5),
    size=st.integers(1, 3000),
    seed=st.integers(0, 1 << 30),
    special=st.lists(st.tuples(st.integers(0, 1 << 20), st.sampled_from(SPECIAL)), max_size=8),
)
def test_first_of_the_highest_logits_is_found(
    dtype: torch.dtype, rows: int, size: int, seed: int, special: list[tuple[int, float]]
) -> None:
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    for place, value in special:
        logits.view(-1)[place % logits.numel()] = value

    token_ids, has_nan = MostLikely()(logits)

    firsts = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert token_ids.tolist() == firsts
    assert not has_nan.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", (1.0, -1.0))
def test_nan_of_either_sign_is_told_for_its_row_only(dtype: torch.dtype, sign: float) -> None:
    logits = torch.randn(3, 5000).to(dtype)
    logits[1, 4321] = torch.copysign(torch.tensor(float("nan")), torch.tensor(sign)).to(dtype)

    token_ids, has_nan = MostLikely()(logits)

    assert has_nan.tolist() == [False, True, False]
    assert token_ids[[0, 2]].tolist() == logits[[0, 2]].max(dim=1).indices.tolist()


def test_row_of_nothing_but_impossible_tokens_has_a_first_one() -> None:
    token_ids, has_nan = MostLikely()(torch.full((2, 2000), float("-inf")))

    assert token_ids.tolist() == [0, 0]
    assert not has_nan.any()


def test_part_of_a_larger_tensor_is_searched_as_it_lies() -> None:
    logits = torch.randn(4, 300)[:, :200]

    token_ids, _ = MostLikely()(logits)

    assert token_ids.tolist() == logits.max(dim=1).indices.tolist()
