"""The compiled search for the most likely token, compared with torch's."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from engine.kernels.call import ELEMENTS_PER_THREAD
from engine.sampling.most_likely import MostLikely
from engine.sampling.processors.processor import LOWEST

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


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    size=st.integers(1, 1500),
    num_words=st.integers(1, 50),
    num_allowed=st.lists(st.sampled_from((0, 1, 3, 200, 5000)), min_size=1, max_size=4),
    seed=st.integers(0, 1 << 30),
    special=st.lists(
        st.tuples(st.integers(0, 1 << 20), st.sampled_from((*SPECIAL, float("nan"), -1e30, 3.4e38))), max_size=8
    ),
)
def test_first_of_the_highest_allowed_logits_is_found_or_left_open(
    dtype: torch.dtype, size: int, num_words: int, num_allowed: list[int], seed: int, special: list[tuple[int, float]]
) -> None:
    """Beside what is done for the rows that are left open: a copy without NaN and infinities, masked and searched."""
    generator = torch.Generator().manual_seed(seed)
    rows, num_bits = len(num_allowed) + 1, 32 * num_words
    logits = torch.randn(rows, size, generator=generator).to(dtype)
    for place, value in special:
        logits.view(-1)[place % logits.numel()] = value
    allowed = np.zeros((rows - 1, num_bits), dtype=np.bool_)
    for mask, count in zip(allowed, num_allowed, strict=True):
        mask[torch.randint(num_bits, (count,), generator=generator).numpy()] = True
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)

    found = MostLikely().allowed(logits, np.arange(-1, rows - 1, dtype=np.int32), words)

    copy = logits.to(torch.float32, copy=True).nan_to_num_(LOWEST, torch.finfo(torch.float32).max, LOWEST)
    for row, mask in enumerate(allowed, start=1):
        fits = torch.zeros(size, dtype=torch.bool)
        fits[: min(size, num_bits)] = torch.from_numpy(mask[:size])
        expected = copy[row].masked_fill_(~fits, -torch.inf).argmax()
        if not found.is_open[row]:
            assert found.token_ids[row] == expected
        has_likely = bool(fits.any()) and -1e27 < copy[row, expected] < 1e38
        assert not (has_likely and found.is_open[row]) or bool(found.has_nan[row])
    assert found.has_nan.tolist() == logits.isnan().any(dim=1).tolist()
    assert bool(found.is_open[0]) == bool(found.has_nan[0])
    if not found.has_nan[0]:
        assert found.token_ids[0] == int((logits[0] == logits[0].max()).nonzero()[0])


def test_rows_with_masks_are_left_open_where_logits_are_no_plain_array() -> None:
    found = MostLikely().allowed(
        torch.randn(2, 300)[:, :64], np.array([-1, 0], dtype=np.int32), np.full((1, 2), -1, dtype=np.int32)
    )

    assert found.is_open.tolist() == [False, True]


@given(
    searches=st.lists(
        # The largest ones are searched by several threads, where there are several.
        st.tuples(st.integers(1, 5), st.sampled_from((1, 700, ELEMENTS_PER_THREAD)), st.booleans()),
        min_size=2,
        max_size=6,
    ),
    seed=st.integers(0, 1 << 30),
)
def test_a_search_is_not_changed_by_the_ones_before_it(searches: list[tuple[int, int, bool]], seed: int) -> None:
    search, generator = MostLikely().on_host(torch.float32), torch.Generator().manual_seed(seed)
    for rows, size, has_nan in searches:
        logits = torch.randn(rows, size, generator=generator)
        logits[-1, 0] = float("nan") if has_nan else 0.0

        token_ids = search.token_ids(logits)

        assert (token_ids is None) == has_nan
        assert token_ids is None or token_ids.tolist() == logits.argmax(dim=1).tolist()
