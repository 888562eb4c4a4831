"""The runner's rows while the tokens of the previous step are not known yet."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from engine.contract.messages import SamplingParams
from engine.contract.step import IntArray, NewRow, SchedulerOutput
from engine.runner.input_batch import UNKNOWN, InputBatch
from kv_transfer.cache_groups import ABSENT_BLOCK

SAMPLING = SamplingParams(max_tokens=9)


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int32)


def new_row(row: int, *token_ids: int) -> NewRow:
    return NewRow(
        row=row,
        request_id=str(row),
        token_ids=ints(*token_ids),
        num_prompt_tokens=len(token_ids),
        block_ids=ints(row)[None],
        sampling=SAMPLING,
    )


def step(rows: IntArray, firsts: IntArray, counts: IntArray, *new_rows: NewRow) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=0,
        rows=rows,
        first_positions=firsts,
        num_scheduled_tokens=counts,
        num_samples=np.ones(rows.size, dtype=np.int32),
        new_rows=new_rows,
    )


@pytest.fixture
def batch() -> InputBatch:
    """Rows 1 and 3 hold three tokens each, and a step in flight samples their fourth."""
    batch = InputBatch(max_num_seqs=4, max_model_len=16, block_size=16)
    batch.apply(step(ints(3, 1), ints(0, 0), ints(3, 3), new_row(3, 30, 31, 32), new_row(1, 10, 11, 12)))
    batch.expect(ints(3, 1), ints(3, 3))
    return batch


@pytest.mark.behaviour("F5")
def test_f5_an_unknown_token_is_taken_from_where_its_step_left_it(batch: InputBatch) -> None:
    output = step(ints(1, 2, 3), ints(3, 0, 3), ints(1, 2, 1), new_row(2, 20, 21))
    batch.apply(output)

    inputs = batch.prepare(output)

    assert inputs.input_ids.tolist() == [UNKNOWN, 20, 21, UNKNOWN]
    assert inputs.unknown is not None
    assert inputs.unknown.rows.tolist() == [1, 3]
    assert inputs.unknown.tokens.tolist() == [0, 3]
    assert inputs.unknown.sources.tolist() == [1, 0]


@given(data=st.data(), positions=st.lists(st.integers(0, 63), min_size=1, max_size=6))
def test_a_decode_step_is_laid_out_as_the_same_rows_beside_a_prefill(data: st.DataObject, positions: list[int]) -> None:
    """Which takes the way of all other steps."""
    generator = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    windows = data.draw(st.sampled_from(((None,), (9,), (None, 20, 20), (30, 3))))
    batch = InputBatch(
        max_num_seqs=8, max_model_len=64, block_size=data.draw(st.sampled_from((4, 16))), windows=windows
    )
    rows = data.draw(st.permutations(range(8)))
    batch.apply(
        step(ints(0), ints(0), ints(1))._replace(
            new_rows=tuple(
                dataclasses.replace(
                    new_row(row, *generator.integers(0, 99, 64)),
                    block_ids=generator.integers(0, 99, (len(windows), 64 // batch.block_size), dtype=np.int32),
                )
                for row in range(8)
            ),
        )
    )
    decoding, firsts = ints(*rows[: len(positions)]), ints(*positions)
    count = len(positions)

    inputs = batch.prepare(step(decoding, firsts, ints(*[1] * count)))
    mixed = batch.prepare(step(ints(*decoding, rows[-1]), ints(*firsts, 0), ints(*[1] * count, 2)))

    assert inputs.is_decode
    assert not mixed.is_decode
    for name in ("input_ids", "positions", "last_tokens", "sampled_rows", "sampled_positions"):
        assert getattr(inputs, name).tolist() == getattr(mixed, name)[:count].tolist(), name
        assert getattr(inputs, name).dtype == getattr(mixed, name).dtype, name
    ours, theirs = inputs.attention, mixed.attention
    assert ours.is_decode
    assert not theirs.is_decode
    assert ours.query_starts.tolist() == theirs.query_starts[: count + 1].tolist()
    assert ours.first_positions.tolist() == theirs.first_positions[:count].tolist()
    assert ours.slots.tolist() == theirs.slots[:, :count].tolist()
    num_columns = ours.block_tables.shape[2]
    assert num_columns == max(positions) // batch.block_size + 1
    assert ours.block_tables.tolist() == theirs.block_tables[:, :count, :num_columns].tolist()


@pytest.mark.parametrize("num_new", [1, 3])
def test_blocks_before_the_window_are_named_to_nobody(num_new: int) -> None:
    """They may have been given to another request, and the entries may be older than that."""
    batch = InputBatch(max_num_seqs=2, max_model_len=64, block_size=4, windows=(None, 9, 6))
    absent = ABSENT_BLOCK
    tables = ints(*range(10, 16)), ints(absent, absent, absent, 23, 24, 25), ints(30, 31, 32, 33, 34, 35)
    row = dataclasses.replace(new_row(1, *range(24)), block_ids=np.stack(tables))
    output = step(ints(1), ints(20), ints(num_new), row)._replace(num_samples=ints(int(num_new == 1)))
    batch.apply(output)

    attention = batch.prepare(output).attention

    assert attention.block_tables.tolist() == [
        [[10, 11, 12, 13, 14, 15]],
        [[23, 23, 23, 23, 24, 25]],
        [[33, 33, 33, 33, 34, 35]],
    ]
    assert attention.slots.tolist() == [[block * 4 + offset for offset in range(num_new)] for block in (15, 25, 35)]


def test_appended_blocks_go_to_the_tables_of_their_groups() -> None:
    batch = InputBatch(max_num_seqs=2, max_model_len=64, block_size=4, windows=(None, 8))
    first = step(ints(1), ints(0), ints(4), dataclasses.replace(new_row(1, 1, 2, 3, 4), block_ids=np.array([[7], [8]])))
    batch.apply(first)
    batch.learn(ints(1), ints(4), ints(5))
    second = step(ints(1), ints(4), ints(1))._replace(
        append_rows=ints(1, 1), append_columns=ints(1, 1), append_block_ids=ints(70, 80), append_groups=ints(0, 1)
    )
    batch.apply(second)

    assert batch.prepare(second).attention.block_tables.tolist() == [[[7, 70]], [[8, 80]]]


def test_rows_that_do_not_all_sample_are_no_decode_step(batch: InputBatch) -> None:
    output = step(ints(1, 3), ints(1, 1), ints(1, 1))

    inputs = batch.prepare(output._replace(num_samples=np.array([1, 0], dtype=np.int32)))

    assert not inputs.is_decode
    assert inputs.last_tokens.tolist() == [0]


@pytest.mark.behaviour("F3")
def test_f3_a_row_with_drafts_samples_after_each_of_them() -> None:
    """Row 1 computes its last known token and two drafts, row 3 a chunk of a prompt, row 0 one token."""
    batch = InputBatch(max_num_seqs=4, max_model_len=16, block_size=16)
    rows, firsts, counts = ints(1, 3, 0), ints(2, 0, 1), ints(3, 2, 1)
    output = step(rows, firsts, counts, new_row(1, 10, 11, 12), new_row(3, 30, 31, 32), new_row(0, 5, 6))
    output = output._replace(num_samples=ints(3, 0, 1), draft_token_ids=ints(77, 78))
    batch.apply(output)

    inputs = batch.prepare(output)

    assert inputs.input_ids.tolist() == [12, 77, 78, 30, 31, 6]
    assert inputs.positions.tolist() == [2, 3, 4, 0, 1, 1]
    assert inputs.last_tokens.tolist() == [0, 1, 2, 5]
    assert inputs.sampled_rows.tolist() == [1, 1, 1, 0]
    assert inputs.sampled_positions.tolist() == [3, 4, 5, 2]
    assert batch.history.token_ids[1, :5].tolist() == [10, 11, 12, 77, 78], "what processors read"


@pytest.mark.behaviour("F3")
def test_f3_tokens_drawn_for_drafts_take_their_places() -> None:
    """The first draft was right and the second wrong: what was drawn behind that is not read again."""
    batch = InputBatch(max_num_seqs=4, max_model_len=16, block_size=16)
    output = step(ints(1), ints(2), ints(3), new_row(1, 10, 11, 12))
    batch.apply(output)
    batch.prepare(output._replace(num_samples=ints(3), draft_token_ids=ints(77, 78)))

    batch.learn(ints(1, 1, 1), ints(3, 4, 5), ints(77, 80, 90))

    assert batch.prepare(step(ints(1), ints(4), ints(1))).input_ids.tolist() == [80]
    assert batch.history.token_ids[1, :5].tolist() == [10, 11, 12, 77, 80]


@pytest.mark.behaviour("F5")
def test_f5_once_learned_it_is_known(batch: InputBatch) -> None:
    batch.learn(ints(3, 1), ints(3, 3), ints(33, 13))

    inputs = batch.prepare(step(ints(1, 3), ints(3, 3), ints(1, 1)))

    assert inputs.input_ids.tolist() == [13, 33]
    assert inputs.unknown is None


@pytest.fixture
def late(batch: InputBatch) -> InputBatch:
    """Rows 1 and 3 hold four tokens each; their fourth ones are to be stored with the next step."""
    batch.learn(ints(3, 1), ints(3, 3), ints(0, 0))
    batch.learn_later(ints(3, 1), ints(3, 3), ints(33, 13))
    return batch


def test_tokens_learned_later_are_read_by_the_next_decode_step(late: InputBatch) -> None:
    inputs = late.prepare(step(ints(1, 3), ints(3, 3), ints(1, 1)))

    assert inputs.is_decode
    assert inputs.input_ids.tolist() == [13, 33]
    assert late.history.token_ids[[1, 3], 3].tolist() == [13, 33]


def test_tokens_learned_later_are_read_by_the_next_step_of_prompts(late: InputBatch) -> None:
    output = step(ints(1, 3, 2), ints(2, 3, 0), ints(2, 1, 2), new_row(2, 20, 21))
    late.apply(output)

    assert late.prepare(output).input_ids.tolist() == [12, 13, 33, 20, 21]


def test_tokens_learned_later_do_not_touch_a_row_that_another_request_has_taken(late: InputBatch) -> None:
    output = step(ints(3, 1), ints(4, 3), ints(1, 1), new_row(3, 50, 51, 52, 53, 54))
    late.apply(output)

    assert late.prepare(output).input_ids.tolist() == [54, 13]
    assert late.history.token_ids[3, :5].tolist() == [50, 51, 52, 53, 54]


def test_tokens_learned_later_keep_their_order_with_others(late: InputBatch) -> None:
    late.learn(ints(3), ints(3), ints(34))
    late.learn_later(ints(1), ints(4), ints(14))
    late.learn_later(ints(1), ints(5), ints(15))

    inputs = late.prepare(step(ints(1, 3), ints(5, 3), ints(1, 1)))

    assert inputs.input_ids.tolist() == [15, 34]
    assert late.history.token_ids[1, 3:6].tolist() == [13, 14, 15]


def test_tokens_learned_later_are_stored_before_others_are_expected(late: InputBatch) -> None:
    late.expect(ints(1), ints(4))

    assert late.history.token_ids[1, 3:5].tolist() == [13, UNKNOWN]
    inputs = late.prepare(step(ints(1, 3), ints(4, 3), ints(1, 1)))
    assert inputs.input_ids.tolist() == [UNKNOWN, 33]
    assert inputs.unknown is not None
    assert inputs.unknown.tokens.tolist() == [0]


@pytest.mark.behaviour("F5")
def test_f5_what_comes_late_does_not_touch_a_row_that_another_request_has_taken(batch: InputBatch) -> None:
    output = step(ints(3, 1), ints(0, 3), ints(5, 1), new_row(3, 50, 51, 52, 53, 54))
    batch.apply(output)

    inputs = batch.prepare(output)
    batch.learn(ints(3, 1), ints(3, 3), ints(33, 13))

    assert inputs.unknown is not None
    assert inputs.unknown.rows.tolist() == [1]
    assert batch.prepare(output).input_ids.tolist() == [50, 51, 52, 53, 54, 13]


@pytest.mark.behaviour("F5")
def test_f5_a_third_step_cannot_be_prepared_before_the_first_is_known(batch: InputBatch) -> None:
    with pytest.raises(AssertionError, match="only one step"):
        batch.expect(ints(3, 1), ints(4, 4))
