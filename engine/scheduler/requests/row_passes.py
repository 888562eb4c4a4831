"""Compiled passes over the rows of running requests: what a step gives each row, and what it returns.

Between two steps, the model's weights have pushed everything else out of the processor's caches, and every numpy
operation begins by fetching its own code from memory. One pass that does all the work fetches little.
"""

import numpy as np
from numba import njit, types

from engine.kernels.compiled import OPTIONS, PART_OPTIONS

# Indices of the lines of ``RowTable.columns``.
NUM_TOKENS, NUM_EXPECTED, NUM_COMPUTED, CEILING, CAPACITY = range(5)
LIMIT, FIRST_STOP, PUBLISH_GOAL, EPOCH, IS_STALLED, PROMISED_GAP = range(5, 11)
FIRST_STOP_ID = 11

# Indices of the lines that ``advance`` writes: LACKING only if some rows lack blocks, EPOCHS only if none does.
ROWS, FIRST_POSITIONS, COUNTS, ENDS, NUM_SAMPLES, EPOCHS = range(6)
LACKING = EPOCHS
NUM_LINES = 6

# Indices of the lines that ``append_sampled`` and ``append_verified`` write.
FULL, ENDED, NUM_APPENDED = range(3)
NUM_FOUND = 3

NO_GAP = int(np.iinfo(np.int32).max)
"""The promised gap of a row without such a promise."""

_INTS = types.Array(types.int32, 1, "C", readonly=True)
_LINES = types.int32[:, ::1]
_NUMBER = types.int64


@njit(**PART_OPTIONS)
def _need(columns, row, cap):
    """How many tokens a row would compute with unlimited budget; more than one only of a prompt."""
    need = min(columns[NUM_EXPECTED, row], columns[CEILING, row]) - columns[NUM_COMPUTED, row]
    return min(need, cap) if cap else need


@njit(**OPTIONS)
def _count_as_computed(columns, order, lines):
    num_rows, num_tokens, num_sampling = 0, 0, 0
    for i in range(len(order)):
        row, count, end = order[i], lines[COUNTS, i], lines[ENDS, i]
        if count == 0:
            continue
        samples = end == columns[NUM_EXPECTED, row]
        columns[NUM_COMPUTED, row] = end
        columns[NUM_EXPECTED, row] += samples
        lines[ROWS, num_rows], lines[COUNTS, num_rows], lines[ENDS, num_rows] = row, count, end
        lines[FIRST_POSITIONS, num_rows], lines[EPOCHS, num_rows] = end - count, columns[EPOCH, row]
        lines[NUM_SAMPLES, num_rows] = samples
        num_rows += 1
        num_tokens += count
        num_sampling += samples
    return 0, num_rows, num_tokens, num_sampling


@njit(
    types.UniTuple(types.int64, 4)(_LINES, _INTS, _INTS, types.int64, types.int64, types.int64, types.boolean, _LINES),
    **OPTIONS,
)
def advance(columns, order, shares, cap, budget, prompt_budget, is_chunked, lines):
    """Hand tokens to the rows in ``order``, and count them as computed unless some rows lack blocks.

    Each row gets what it needs, at most ``cap`` unless that is 0, until ``budget`` is spent. Rows that need more than
    one token also share ``prompt_budget``. Unless ``is_chunked``, a row gets all that it needs or nothing. If
    ``shares`` is not empty, it says what each row gets instead.

    Returns:
        (number of lacking rows, rows, tokens, sampling rows). If rows lack blocks, nothing was counted: LACKING has
        their indices in ``order``, and ENDS has, for all rows, the positions that they would have reached. Otherwise
        all lines but LACKING describe the rows that compute, in order.
    """
    num_lacking, left, prompt_left = 0, budget, prompt_budget
    for i in range(len(order)):
        row = order[i]
        computed = columns[NUM_COMPUTED, row]
        grant = 0
        if len(shares):
            grant = shares[i]
        elif not columns[IS_STALLED, row]:
            need = _need(columns, row, cap)
            grant = min(max(left, 0), need)
            if need > 1:
                grant = min(grant, max(prompt_left, 0))
                left -= min(need, max(prompt_left, 0))
                prompt_left -= need
            else:
                left -= need
            grant = grant if is_chunked or grant == need else 0
        lines[COUNTS, i] = grant
        lines[ENDS, i] = computed + grant
        if computed + grant > columns[CAPACITY, row]:
            lines[LACKING, num_lacking] = i
            num_lacking += 1
    if num_lacking:
        return num_lacking, 0, 0, 0
    return _count_as_computed(columns, order, lines)


@njit(types.UniTuple(_NUMBER, 4)(_LINES, _INTS, _NUMBER), **OPTIONS)
def decoding(columns, order, cap):
    """Sum up the rows in ``order`` that need at most one token.

    Returns:
        (how many, tokens that they read, the least of their promised gaps, index of the first other row).
    """
    num_rows, num_context, gap, first = 0, 0, NO_GAP, len(order)
    for i in range(len(order)):
        row = order[i]
        if _need(columns, row, cap) > 1:
            first = min(first, i)
            continue
        num_rows += 1
        num_context += columns[NUM_EXPECTED, row]
        gap = min(gap, columns[PROMISED_GAP, row])
    return num_rows, num_context, gap, first


@njit(types.UniTuple(_NUMBER, 3)(_LINES, _INTS), **OPTIONS)
def measure(columns, order):
    """Sum up what is left and done of the rows in ``order``.

    Returns:
        (tokens to compute before each can take one token a step, rows that already do, tokens computed by all).
    """
    num_left, num_decoding, num_computed = 0, 0, 0
    for row in order:
        computed = columns[NUM_COMPUTED, row]
        left = columns[NUM_EXPECTED, row] - computed - 1
        num_left += max(left, 0)
        num_decoding += left <= 0
        num_computed += computed
    return num_left, num_decoding, num_computed


@njit(types.UniTuple(_NUMBER, 4)(_INTS, _INTS, _INTS), **OPTIONS)
def work_of(counts, num_samples, ends):
    """Sum up what rows compute: ``counts`` tokens each, the known ones up to ``ends`` and the drafts after them.

    Returns:
        (tokens of rows with one known token, drafts included, tokens that these rows read, tokens of the other rows,
        tokens that those read), as in ``StepWork``.
    """
    num_rows, num_context, num_prompt, num_reads = 0, 0, 0, 0
    for i in range(len(counts)):
        known = counts[i] - max(num_samples[i] - 1, 0)
        if known > 1:
            num_prompt += known
            num_reads += known * (ends[i] - known) + known * known // 2
        else:
            num_rows += counts[i]
            num_context += ends[i]
    return num_rows, num_context, num_prompt, num_reads


@njit(types.UniTuple(_NUMBER, 2)(_LINES, _LINES, _NUMBER, _INTS, _INTS, _INTS, _INTS, _LINES), **OPTIONS)
def append_sampled(columns, token_ids, num_stop_ids, rows, ends, tokens, num_samples, found):
    """Store the sampled tokens of ``rows``, computed up to ``ends``; find rows with a full block or at their end.

    token_ids: [max_num_seqs, width] all rows' tokens. Of each row's stop ids the first ``num_stop_ids`` are compared.
    tokens: one for each sampling row.

    Returns:
        (n, m): ``found[FULL, :n]`` are the indices of rows with a newly full block. ``found[ENDED, :m]`` are those of
        rows that end with their new token, counted among the sampling rows.
    """
    num_full, num_ended, num_sampled = 0, 0, 0
    for i in range(len(rows)):
        row, end = rows[i], ends[i]
        if end >= columns[PUBLISH_GOAL, row]:
            found[FULL, num_full] = i
            num_full += 1
        if not num_samples[i]:
            continue
        token = tokens[num_sampled]
        token_ids[row, end] = token
        columns[NUM_TOKENS, row] = end + 1
        has_ended = end + 1 >= columns[LIMIT, row]
        if end + 1 >= columns[FIRST_STOP, row]:
            for column in range(FIRST_STOP_ID, FIRST_STOP_ID + num_stop_ids):
                has_ended |= columns[column, row] == token
        if has_ended:
            found[ENDED, num_ended] = num_sampled
            num_ended += 1
        num_sampled += 1
    return num_full, num_ended


@njit(types.Tuple((_NUMBER, types.boolean))(_LINES, _LINES, _NUMBER, _NUMBER, _NUMBER, _INTS), **OPTIONS)
def _append(columns, token_ids, num_stop_ids, row, end, tokens):
    """Store a row's new tokens from position ``end`` on, up to the first one that ends the row."""
    has_ended = False
    for token in tokens:
        token_ids[row, end] = token
        end += 1
        has_ended = end >= columns[LIMIT, row]
        if end >= columns[FIRST_STOP, row]:
            for column in range(FIRST_STOP_ID, FIRST_STOP_ID + num_stop_ids):
                has_ended |= columns[column, row] == token
        if has_ended:
            break
    columns[NUM_TOKENS, row] = end
    return end, has_ended


@njit(types.UniTuple(_NUMBER, 2)(_LINES, _LINES, _NUMBER, _INTS, _INTS, _INTS, _INTS, _INTS, _LINES), **OPTIONS)
def append_verified(columns, token_ids, num_stop_ids, rows, ends, tokens, num_samples, num_accepted, found):
    """``append_sampled`` for a step with draft tokens.

    ``tokens`` holds ``num_samples`` tokens of each row, one row after the other. The first ``num_accepted + 1`` are
    stored, up to one that ends the row. Rows with more than one sample have computed their accepted draft tokens too;
    only now do these count as computed.

    Returns:
        The same; ``found[NUM_APPENDED]`` is how many tokens were stored for each sampling row.
    """
    num_full, num_ended, num_sampling, at = 0, 0, 0, 0
    for i in range(len(rows)):
        row, end = rows[i], ends[i]
        if num_samples[i]:
            of_row = tokens[at : at + num_accepted[i] + 1]
            end, has_ended = _append(columns, token_ids, num_stop_ids, row, end, of_row)
            found[NUM_APPENDED, num_sampling] = end - ends[i]
            if num_samples[i] > 1:
                columns[NUM_EXPECTED, row], columns[NUM_COMPUTED, row] = end, end - 1
            if has_ended:
                found[ENDED, num_ended] = num_sampling
                num_ended += 1
            end -= 1
            at += num_samples[i]
            num_sampling += 1
        if end >= columns[PUBLISH_GOAL, row]:
            found[FULL, num_full] = i
            num_full += 1
    return num_full, num_ended


NO_SHARES = np.empty(0, np.int32)
NO_SHARES.setflags(write=False)
