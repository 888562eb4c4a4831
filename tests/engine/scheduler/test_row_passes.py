"""The compiled passes over rows, compared with a plain version of their rules."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from engine.contract.step import IntArray
from engine.scheduler.requests import row_passes

NUM_ROWS = 6
NUM_STOP_IDS = 2
ROW_LISTS = st.permutations(range(NUM_ROWS)).flatmap(
    lambda rows: st.integers(1, NUM_ROWS).map(lambda count: np.array(rows[:count], np.int32))
)


@st.composite
def tables(draw: st.DrawFn) -> IntArray:
    """Columns of rows that may have computed all, some or none of their known tokens, and have blocks for them
    or not.
    """
    columns = np.zeros((row_passes.FIRST_STOP_ID + NUM_STOP_IDS, NUM_ROWS), np.int32)
    for row in range(NUM_ROWS):
        computed = draw(st.integers(0, 20))
        expected = computed + draw(st.integers(0, 9))
        columns[row_passes.NUM_COMPUTED, row] = computed
        columns[row_passes.NUM_EXPECTED, row] = expected
        columns[row_passes.CEILING, row] = draw(st.integers(computed, 30))
        columns[row_passes.CAPACITY, row] = draw(st.integers(computed, 40))
        columns[row_passes.LIMIT, row] = draw(st.integers(computed, 40))
        columns[row_passes.FIRST_STOP, row] = draw(st.integers(0, 40))
        columns[row_passes.PUBLISH_GOAL, row] = draw(st.integers(1, 40))
        columns[row_passes.EPOCH, row] = draw(st.integers(0, 3))
        columns[row_passes.IS_STALLED, row] = draw(st.sampled_from((0, 0, 0, 1)))
        columns[row_passes.FIRST_STOP_ID :, row] = draw(st.lists(st.integers(-1, 5), min_size=2, max_size=2))
    return columns


def shares_of(
    columns: IntArray, order: IntArray, *, cap: int, budget: int, prompt_budget: int, is_chunked: bool
) -> list[int]:
    """C2 and C3: in order, each what it needs up to its cap, while the budget lasts; prompts while theirs does, which
    is all that they take from the others."""
    shares: list[int] = []
    for row in order.tolist():
        goal = min(columns[row_passes.NUM_EXPECTED, row], columns[row_passes.CEILING, row])
        need = int(goal - columns[row_passes.NUM_COMPUTED, row])
        if columns[row_passes.IS_STALLED, row]:
            need = 0
        need = min(need, cap) if cap else need
        share = min(need, max(budget, 0))
        if need > 1:
            share = min(share, prompt_budget)
            budget -= min(need, prompt_budget)
            prompt_budget = max(prompt_budget - need, 0)
        else:
            budget -= need
        shares.append(share if is_chunked or share == need else 0)
    return shares


@given(
    columns=tables(),
    order=ROW_LISTS,
    cap=st.sampled_from((0, 1, 4)),
    budget=st.integers(0, 30),
    prompt_budget=st.sampled_from((99, 99, 0, 3, 8)),
    is_chunked=st.booleans(),
    are_given=st.booleans(),
)
def test_rows_get_their_shares_and_count_them_once_all_have_blocks(
    columns: IntArray,
    order: IntArray,
    cap: int,
    budget: int,
    prompt_budget: int,
    is_chunked: bool,
    are_given: bool,
) -> None:
    shares = shares_of(columns, order, cap=cap, budget=budget, prompt_budget=prompt_budget, is_chunked=is_chunked)
    before = columns.copy()
    lines = np.empty((row_passes.NUM_LINES, order.size), np.int32)
    given_shares = np.array(shares, np.int32) if are_given else row_passes.NO_SHARES

    num_lacking, num_rows, num_tokens, num_sampling = row_passes.advance(
        columns, order, given_shares, cap, budget, prompt_budget, is_chunked, lines
    )

    computed = before[row_passes.NUM_COMPUTED, order]
    ends = computed + np.array(shares, np.int32)
    lacking = np.flatnonzero(ends > before[row_passes.CAPACITY, order])
    assert num_lacking == lacking.size
    if num_lacking:
        assert lines[row_passes.LACKING, :num_lacking].tolist() == lacking.tolist()
        assert lines[row_passes.ENDS].tolist() == ends.tolist()
        assert np.array_equal(columns, before), "nothing is counted while somebody lacks blocks"
        return
    active = np.flatnonzero(shares)
    rows = order[active]
    assert lines[row_passes.ROWS, :num_rows].tolist() == rows.tolist()
    assert lines[row_passes.FIRST_POSITIONS, :num_rows].tolist() == computed[active].tolist()
    assert lines[row_passes.COUNTS, :num_rows].tolist() == [shares[index] for index in active]
    assert lines[row_passes.ENDS, :num_rows].tolist() == ends[active].tolist()
    assert lines[row_passes.EPOCHS, :num_rows].tolist() == before[row_passes.EPOCH, rows].tolist()
    samples = ends[active] == before[row_passes.NUM_EXPECTED, rows]
    assert lines[row_passes.NUM_SAMPLES, :num_rows].tolist() == samples.astype(int).tolist()
    assert (num_tokens, num_sampling) == (sum(shares), samples.sum())
    expected = before.copy()
    expected[row_passes.NUM_COMPUTED, rows] = ends[active]
    expected[row_passes.NUM_EXPECTED, rows] += samples
    assert np.array_equal(columns, expected)


@given(
    data=st.data(),
    columns=tables(),
    rows=ROW_LISTS,
    num_stop_ids=st.integers(0, NUM_STOP_IDS),
    max_drafts=st.sampled_from((0, 0, 4)),
)
def test_tokens_are_stored_and_full_blocks_and_ends_are_found(
    data: st.DataObject, columns: IntArray, rows: IntArray, num_stop_ids: int, max_drafts: int
) -> None:
    """With drafts a row takes its accepted ones and the token after them, up to the token that ends it."""
    token_ids = np.full((NUM_ROWS, 64), -7, np.int32)
    ends = columns[row_passes.NUM_COMPUTED, rows]
    num_samples, num_accepted, samples = list[int](), list[int](), list[list[int]]()
    for _ in rows:
        num_samples.append(data.draw(st.integers(0, 1 + max_drafts)))
        num_accepted.append(data.draw(st.integers(0, max(num_samples[-1] - 1, 0))))
        samples.append(data.draw(st.lists(st.integers(0, 5), min_size=num_samples[-1], max_size=num_samples[-1])))
    before, found = columns.copy(), np.zeros((row_passes.NUM_FOUND, NUM_ROWS), np.int32)

    tokens = np.array([token for of_row in samples for token in of_row], np.int32)
    arrays = (columns, token_ids, num_stop_ids, rows, ends, tokens, np.array(num_samples, np.int32))
    if max_drafts:
        num_full, num_ended = row_passes.append_verified(*arrays, np.array(num_accepted, np.int32), found)
    else:
        num_full, num_ended = row_passes.append_sampled(*arrays, found)

    expected_ids, expected = np.full((NUM_ROWS, 64), -7, np.int32), before.copy()
    ended, full, num_appended = list[int](), list[int](), list[int]()
    for index, (row, end) in enumerate(zip(rows.tolist(), ends.tolist(), strict=True)):
        computed = end
        if num_samples[index]:
            stop_ids = before[row_passes.FIRST_STOP_ID :, row][:num_stop_ids]
            length = end
            for token in samples[index][: num_accepted[index] + 1]:
                expected_ids[row, length] = token
                length += 1
                is_stop = token in stop_ids and length >= before[row_passes.FIRST_STOP, row]
                if is_stop or length >= before[row_passes.LIMIT, row]:
                    ended.append(len(num_appended))
                    break
            num_appended.append(length - end)
            computed = length - 1
            expected[row_passes.NUM_TOKENS, row] = length
            if num_samples[index] > 1:
                expected[row_passes.NUM_COMPUTED, row] = computed
                expected[row_passes.NUM_EXPECTED, row] = length
        if computed >= before[row_passes.PUBLISH_GOAL, row]:
            full.append(index)
    assert found[row_passes.FULL, :num_full].tolist() == full
    assert found[row_passes.ENDED, :num_ended].tolist() == ended
    if max_drafts:
        assert found[row_passes.NUM_APPENDED, : len(num_appended)].tolist() == num_appended
    assert np.array_equal(token_ids, expected_ids)
    assert np.array_equal(columns, expected)
