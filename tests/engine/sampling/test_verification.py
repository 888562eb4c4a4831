"""Accepted drafts, compared with a plain version of the rule."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from engine.sampling.verification import count_accepted, is_output

TOKENS = st.integers(0, 2)
ROWS = st.lists(
    st.lists(TOKENS, max_size=5).flatmap(
        lambda drafts: st.tuples(st.just(drafts), st.lists(TOKENS, min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    )
    | st.just(([], [])),
    min_size=1,
    max_size=8,
)
"""Drafts and samples of each row: one sample more than drafts, or none of either."""


@given(rows=ROWS)
def test_drafts_are_right_up_to_the_first_that_differs_from_what_was_drawn(
    rows: list[tuple[list[int], list[int]]],
) -> None:
    expected: list[int] = []
    outputs: list[bool] = []
    for drafts, drawn in rows:
        num_right = 0
        while num_right < len(drafts) and drafts[num_right] == drawn[num_right]:
            num_right += 1
        expected.append(num_right)
        outputs += [place <= num_right for place in range(len(drawn))]
    num_samples = np.array([len(drawn) for _, drawn in rows], np.int32)

    num_accepted = count_accepted(
        np.array([token for _, drawn in rows for token in drawn], np.int32),
        num_samples,
        np.array([token for drafts, _ in rows for token in drafts], np.int32),
    )

    assert num_accepted.dtype == np.int32
    assert num_accepted.tolist() == expected
    assert is_output(num_samples, num_accepted).tolist() == outputs
