"""The runner's rows while the tokens of the step before are not known yet."""

from __future__ import annotations

import numpy as np
import pytest

from engine.messages import SamplingParams
from engine.runner.input_batch import UNKNOWN, InputBatch
from engine.step import IntArray, NewRow, SchedulerOutput

SAMPLING = SamplingParams(max_tokens=9)


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int32)


def new_row(row: int, *token_ids: int) -> NewRow:
    return NewRow(
        row=row,
        request_id=str(row),
        token_ids=ints(*token_ids),
        num_prompt_tokens=len(token_ids),
        block_ids=ints(row),
        sampling=SAMPLING,
    )


def step(rows: IntArray, firsts: IntArray, counts: IntArray, *new_rows: NewRow) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=0,
        rows=rows,
        first_positions=firsts,
        num_scheduled_tokens=counts,
        is_sampling=np.ones(rows.size, dtype=np.bool_),
        new_rows=new_rows,
    )


@pytest.fixture
def batch() -> InputBatch:
    """Rows 1 and 3 hold three tokens each, and a step in flight samples their fourth."""
    batch = InputBatch(max_num_seqs=4, max_model_len=16, block_size=16)
    batch.apply(step(ints(3, 1), ints(0, 0), ints(3, 3), new_row(3, 30, 31, 32), new_row(1, 10, 11, 12)))
    batch.expect(ints(3, 1), ints(3, 3))
    return batch


def test_f5_an_unknown_token_is_taken_from_where_its_step_left_it(batch: InputBatch) -> None:
    output = step(ints(1, 2, 3), ints(3, 0, 3), ints(1, 2, 1), new_row(2, 20, 21))
    batch.apply(output)

    inputs = batch.prepare(output)

    assert inputs.input_ids.tolist() == [UNKNOWN, 20, 21, UNKNOWN]
    assert inputs.unknown is not None
    assert inputs.unknown.rows.tolist() == [1, 3]
    assert inputs.unknown.tokens.tolist() == [0, 3]
    assert inputs.unknown.sources.tolist() == [1, 0]


def test_f5_once_learned_it_is_known(batch: InputBatch) -> None:
    batch.learn(ints(3, 1), ints(3, 3), ints(33, 13))

    inputs = batch.prepare(step(ints(1, 3), ints(3, 3), ints(1, 1)))

    assert inputs.input_ids.tolist() == [13, 33]
    assert inputs.unknown is None


def test_f5_what_comes_late_does_not_touch_a_row_that_another_request_has_taken(batch: InputBatch) -> None:
    output = step(ints(3, 1), ints(0, 3), ints(5, 1), new_row(3, 50, 51, 52, 53, 54))
    batch.apply(output)

    inputs = batch.prepare(output)
    batch.learn(ints(3, 1), ints(3, 3), ints(33, 13))

    assert inputs.unknown is not None
    assert inputs.unknown.rows.tolist() == [1]
    assert batch.prepare(output).input_ids.tolist() == [50, 51, 52, 53, 54, 13]


def test_f5_a_third_step_cannot_be_prepared_before_the_first_is_known(batch: InputBatch) -> None:
    with pytest.raises(AssertionError, match="only one step"):
        batch.expect(ints(3, 1), ints(4, 4))
