"""Compiled passes over the rows of a decode step: its inputs before the model runs, its tokens afterwards.

Each does everything in one pass, and the first one stores the tokens of the step before, too: a step's weights push
all other data out of the caches, and what is called after it waits for memory. See
``engine.scheduler.requests.row_passes``.
"""

from numba import njit, types

from engine.kernels.compiled import OPTIONS

_INTS = types.Array(types.int32, 1, "C", readonly=True)
_BOOLS = types.Array(types.boolean, 1, "C", readonly=True)
_TABLE = types.int32[:, ::1]
_TABLES = types.int32[:, :, ::1]
_LONGS = types.int64[::1]
_NUMBERS = types.int32[::1]


@njit(
    types.UniTuple(types.int64, 3)(
        *(_INTS, _INTS, _INTS),
        *(_INTS, _INTS, _NUMBERS, _TABLE, _TABLES, _LONGS, types.int64, _BOOLS),
        *(_LONGS, _LONGS, _LONGS, _NUMBERS, _TABLES),
    ),
    **OPTIONS,
)
def lay_out(
    stored_rows,
    stored_at,
    stored,
    rows,
    at,
    ends,
    token_ids,
    block_tables,
    windows,
    block_size,
    is_argmax_only,
    input_ids,
    positions,
    slots,
    first_positions,
    tables,
):
    """Write the inputs of a step in which each of ``rows`` computes the token at its position ``at``.

    Before that, token_ids[stored_row, stored_at] = stored for each of ``stored``.
    Read, for all rows of the batch: token_ids, block_tables [num_groups, num_rows, num_columns], is_argmax_only;
    windows: [num_groups], 0 for none.
    Written: ends, the positions after ``at``; slots, [num_groups, num_rows]; tables, [num_groups, num_rows, all
    columns], of which only the columns that some row needs are written, and columns before a row's window name the
    window's first block; and the other arrays.

    Returns:
        (num_columns, number of tokens that are negative, number of rows that are argmax only).
    """
    for i in range(len(stored_rows)):
        token_ids[stored_rows[i], stored_at[i]] = stored[i]
    last = 0
    for i in range(len(rows)):
        last = max(last, at[i])
    num_columns = last // block_size + 1
    num_unknown, num_argmax_only = 0, 0
    for i in range(len(rows)):
        row, position = rows[i], at[i]
        input_ids[i] = token_ids[row, position]
        positions[i] = first_positions[i] = position
        ends[i] = position + 1
        for group in range(len(windows)):
            place = group * len(rows) + i
            source = block_tables[group, row]
            slots[place] = source[position // block_size] * block_size + position % block_size
            first = max(position + 1 - windows[group], 0) // block_size if windows[group] else 0
            for column in range(first):
                tables[group, i, column] = source[first]
            for column in range(first, num_columns):
                tables[group, i, column] = source[column]
        num_unknown += token_ids[row, position] < 0
        num_argmax_only += is_argmax_only[row]
    return num_columns, num_unknown, num_argmax_only


@njit(types.void(_TABLE, _INTS, _INTS, _INTS), **OPTIONS)
def store(token_ids, rows, positions, sampled):
    """token_ids[row, position] = sampled, for each sample."""
    for i in range(len(rows)):
        token_ids[rows[i], positions[i]] = sampled[i]
