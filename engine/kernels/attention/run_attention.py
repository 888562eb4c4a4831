"""Compiled attention for a run of tokens of one request: reads the cache's blocks in place, in one pass over the keys.

Source: Dao et al., FlashAttention, 2022; the tiles as in Goto and van de Geijn, Anatomy of High-Performance Matrix
Multiplication, 2008. Key tiles start at multiples of ``KEYS``, so that a token's result does not depend on how its
prompt was cut into chunks.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import carray, njit, types
from numba.extending import overload

from engine.kernels.attention.dot_tile import COLUMNS, ROWS, WORD_BYTES, add_tile, set_tile
from engine.kernels.compiled import (
    BODY_OPTIONS,
    NUM_SCORE_NUMBERS,
    PART_OPTIONS,
    SCALE,
    SOFTCAP,
    STORAGE,
    add_to_each,
    cap_scores,
    compile_kernel,
    exp,
    start_softmax,
)
from engine.kernels.machine_code import address_of, narrow, pointer, take_next, widen
from engine.kernels.row_loops import highest_score, soften_row

KEYS = 128
"""Positions in a tile. Their packed keys and values and the scores of a few rows fit a core's L1 cache."""

# The fields of the parameter block, all int64.
COUNTER, QUERY, OUTPUT, TABLES, ITEMS, CACHE = range(6)  # addresses
NUM_TOKENS, NUM_TABLES, TABLE_WIDTH, NUM_ITEMS = 6, 7, 8, 9
NUM_KV_HEADS, GROUP, HEAD_DIM = 10, 11, 12
NUM_CACHE_ROWS, BLOCK_SIZE, BLOCK_ROWS, HEAD_ROWS = 13, 14, 15, 16
FIRST_ROW, WINDOW, MAX_QUERIES = 17, 18, 19
NUMBERS, SINKS = (
    20,
    21,
)  # addresses of float32: ``NUM_SCORE_NUMBERS`` numbers; the sinks of all heads, 0 for none
VALUE_DIM, VALUE_ROWS = 22, 23  # size of a value; its distance from its key in cache rows, 0: it is part of the key
NUM_PARAMETERS = 24

# The columns of ``ITEMS``, int32: a run of queries of one request.
FIRST_TOKEN, NUM_QUERIES, FIRST_POSITION, TABLE = range(4)
ITEM_WIDTH = 4


def _pack_values(rows, indices, count, packed):
    """Pack the values of a tile as words of [reduction, VALUE_DIM] or slightly wider; the rest of a partial tile is
    zero.

    If a value is narrower than its row, what follows it in the row is packed too as far as there is room; no output
    uses it.
    """


@overload(_pack_values)
def _choose_pack_values(rows, indices, count, packed):
    """Chooses the packing: pairs of positions side by side for bfloat16 products, single numbers for float32."""
    del rows, indices, count
    return _pack_value_pairs if packed.dtype == types.uint32 else _pack_value_numbers


def _pack_value_pairs(rows, indices, count, packed):
    for pair in range(count // 2):
        first, second, target = rows[indices[2 * pair]], rows[indices[2 * pair + 1]], packed[pair]
        for d in range(min(len(first), len(target))):
            target[d] = np.uint32(first[d]) | (np.uint32(second[d]) << np.uint32(16))
    if count % 2:
        first, target = rows[indices[count - 1]], packed[count // 2]
        for d in range(min(len(first), len(target))):
            target[d] = np.uint32(first[d])
    packed[(count + 1) // 2 :] = 0


def _pack_value_numbers(rows, indices, count, packed):
    for t in range(count):
        source, target = rows[indices[t]], packed[t]
        for d in range(min(len(source), len(target))):
            target[d] = widen(source[d])
    packed[count:] = 0


@njit(**PART_OPTIONS)
def _pack_keys(rows, indices, count, packed):
    """Pack the keys of a tile as words of [reduction, KEYS]."""
    for t in range(count):
        source = rows[indices[t]]
        for word in range(len(source)):
            packed[word, t] = widen(source[word])


@njit(**PART_OPTIONS)
def _pack_queries(query, first_token, num_queries, first_head, group, packed):
    """Pack queries by position, then by the heads of a group; rows that pad a tile are zero."""
    for index in range(num_queries):
        for g in range(group):
            source, target = query[first_token + index, first_head + g], packed[index * group + g]
            for d in range(len(source)):
                target[d] = narrow(widen(source[d]), target[d])
    packed[num_queries * group : num_queries * group + ROWS] = 0


@njit(**PART_OPTIONS)
def _soften(scores, low, high, width, scale, softcap, row, maxima, totals, sums, weights):
    """Turn a row's scores into weights relative to its running maximum, and rescale the previous sums to it.

    Scores and maxima are not multiplied with ``scale`` yet.
    """
    if softcap > 0:
        cap_scores(scores, width, scale, softcap)
    scores[:low] = -np.inf
    scores[high:width] = -np.inf
    highest = highest_score(address_of(scores), width, maxima[row])
    correction = exp((maxima[row] - highest) * scale)
    total = soften_row(address_of(scores), address_of(weights), width, highest, scale, weights[0])
    maxima[row] = highest
    totals[row] = totals[row] * correction + total
    if correction != np.float32(1.0):
        for d in range(sums.shape[1]):
            sums[row, d] *= correction


@njit(**PART_OPTIONS)
def _score(queries, row, keys, width, scores):
    """Dot products of a tile of queries with the first ``width`` keys of a tile."""
    source, stride = address_of(queries) + row * queries.strides[0], queries.strides[0]
    for start in range(0, width * WORD_BYTES, COLUMNS * WORD_BYTES):
        packed, target = address_of(keys) + start, address_of(scores) + start
        tile_bytes = KEYS * WORD_BYTES
        set_tile(source, stride, packed, tile_bytes, stride // WORD_BYTES, target, tile_bytes, queries[0, 0])


@njit(**PART_OPTIONS)
def _add(weights, width, values, sums, row):
    """Add the first ``width`` values of a tile, multiplied by their weights."""
    source, stride, num_words = address_of(weights), weights.strides[0], width * weights.itemsize // WORD_BYTES
    first_sum = address_of(sums) + row * sums.strides[0]
    for start in range(0, sums.strides[0], COLUMNS * WORD_BYTES):
        packed = address_of(values) + start
        add_tile(
            source, stride, packed, values.strides[0], num_words, first_sum + start, sums.strides[0], weights[0, 0]
        )


@njit(**BODY_OPTIONS)
def _attend_rows(place, window, scale, softcap, operands, state, scratch):
    """Process one tile of query rows with one tile of keys.

    place: first row, number of rows, heads of a group, the first row's position, the first key's position, number of
        keys.
    """
    row, num_rows, group, first, base, count = place
    queries, keys, values = operands
    sums, maxima, totals = state
    scores, weights = scratch
    visible = min(count, first + (min(row + ROWS, num_rows) - 1) // group + 1 - base)
    if visible <= 0 or first + row // group - window + 1 >= base + KEYS:
        return
    width = (visible + COLUMNS - 1) // COLUMNS * COLUMNS
    _score(queries, row, keys, width, scores)
    for index in range(ROWS):
        position = first + (row + index) // group
        low, high = max(position - window + 1 - base, 0), min(position + 1 - base, count)
        if row + index < num_rows and low < high:
            _soften(scores[index], low, high, width, scale, softcap, row + index, maxima, totals, sums, weights[index])
        else:
            weights[index, :width] = 0
    _add(weights, width, values, sums, row)


@njit(**BODY_OPTIONS)
def _attend(p, query, rows, words, output, product, packed):
    """Take (run of queries, key-value head) pairs from the shared counter until none is left.

    query: [num_tokens, num_heads, head_dim]; output: the same with VALUE_DIM; rows: [cache rows, head_dim] in storage
        type; words: the same memory as the product's words; product, packed: [0], they carry the type of the operands
        and of the packed values.
    """
    num_kv_heads, group, head_dim, block_size = p[NUM_KV_HEADS], p[GROUP], p[HEAD_DIM], p[BLOCK_SIZE]
    items = carray(pointer(p[ITEMS]), (p[NUM_ITEMS], ITEM_WIDTH), dtype=np.int32)
    tables = carray(pointer(p[TABLES]), (p[NUM_TABLES], p[TABLE_WIDTH]), dtype=np.int32)
    numbers = carray(pointer(p[NUMBERS]), (NUM_SCORE_NUMBERS,), dtype=np.float32)
    scale, softcap = numbers[SCALE], numbers[SOFTCAP]
    sinks = carray(pointer(p[SINKS]), (num_kv_heads * group,), dtype=np.float32)
    max_rows = p[MAX_QUERIES] * group + ROWS
    width = (head_dim + COLUMNS - 1) // COLUMNS * COLUMNS  # padded with zeros if the head is narrower
    value_width = (p[VALUE_DIM] + COLUMNS - 1) // COLUMNS * COLUMNS
    queries = np.zeros((max_rows, width), dtype=product.dtype)
    sums = np.empty((max_rows, value_width), dtype=np.float32)
    maxima = np.empty(max_rows, dtype=np.float32)
    totals = np.empty(max_rows, dtype=np.float32)
    keys = np.zeros((width * product.itemsize // WORD_BYTES, KEYS), dtype=np.float32)
    values = np.zeros((KEYS * product.itemsize // WORD_BYTES, value_width), dtype=packed.dtype)
    scores = np.empty((ROWS, KEYS), dtype=np.float32)
    weights = np.zeros((ROWS, KEYS), dtype=product.dtype)
    indices = np.empty(KEYS, dtype=np.int64)
    operands, state = (queries, keys, values), (sums, maxima, totals)
    number = take_next(p[COUNTER])
    while number < p[NUM_ITEMS] * num_kv_heads:
        item, head = items[number // num_kv_heads], number % num_kv_heads
        first, num_queries = np.int64(item[FIRST_POSITION]), np.int64(item[NUM_QUERIES])
        num_rows, table = num_queries * group, tables[item[TABLE]]
        _pack_queries(query, item[FIRST_TOKEN], num_queries, head * group, group, queries)
        sums[: num_rows + ROWS] = 0.0
        start_softmax(sinks[head * group :], p[SINKS] != 0, scale, group, maxima[:num_rows], totals)
        end = first + num_queries
        first_seen = max(first - p[WINDOW] + 1, 0)
        for base in range(first_seen // KEYS * KEYS, end, KEYS):
            count = min(KEYS, end - base)
            for t in range(count):
                position = max(base + t, first_seen)  # blocks before the window may belong to another request
                block, offset = position // block_size, position % block_size
                indices[t] = table[block] * p[BLOCK_ROWS] + head * p[HEAD_ROWS] + p[FIRST_ROW] + offset
            _pack_keys(words, indices, count, keys)
            add_to_each(indices, count, p[VALUE_ROWS])
            _pack_values(rows, indices, count, values)
            for row in range(0, num_rows, ROWS):
                place = row, num_rows, group, first, base, count
                _attend_rows(place, p[WINDOW], scale, softcap, operands, state, (scores, weights))
        for row in range(num_rows):
            target = output[item[FIRST_TOKEN] + row // group, head * group + row % group]
            inverse = np.float32(1.0) / totals[row]
            for d in range(p[VALUE_DIM]):
                target[d] = narrow(sums[row, d] * inverse, target[d])
        number = take_next(p[COUNTER])


@cache
def compiled_run_attention(dtype, *, has_pairs):
    """The address of ``void attend(int64 *parameters)`` for a storage type. With ``has_pairs``, bfloat16 is multiplied
    as such; otherwise everything is multiplied as float32.
    """
    storage = STORAGE[dtype]
    product, packed = (np.uint16, np.uint32) if has_pairs else (np.float32, np.float32)
    word, per_word = (np.float32, 2) if has_pairs else (storage, 1)

    def attend(address):
        p = carray(address, (NUM_PARAMETERS,), dtype=np.int64)
        head_dim, num_rows = p[HEAD_DIM], p[NUM_CACHE_ROWS]
        num_tokens, num_heads = p[NUM_TOKENS], p[NUM_KV_HEADS] * p[GROUP]
        query = carray(pointer(p[QUERY]), (num_tokens, num_heads, head_dim), dtype=storage)
        output = carray(pointer(p[OUTPUT]), (num_tokens, num_heads, p[VALUE_DIM]), dtype=storage)
        rows = carray(pointer(p[CACHE]), (num_rows, head_dim), dtype=storage)
        words = carray(pointer(p[CACHE]), (num_rows, head_dim // per_word), dtype=word)
        _attend(p, query, rows, words, output, np.empty(0, dtype=product), np.empty(0, dtype=packed))

    return compile_kernel(attend)
