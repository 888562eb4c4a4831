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

from engine.kernels.amx import TILE_ROWS
from engine.kernels.attention.dot_tile import COLUMNS, WORD_BYTES
from engine.kernels.attention.run_units import IN_LANES, IN_TILES, add, begin, finish, rows_of, score
from engine.kernels.attention.soft_rows import SIDE, decay, raise_peaks, soften_rows
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
    start_softmax,
)
from engine.kernels.lanes import LANES
from engine.kernels.machine_code import address_of, narrow, pointer, take_next, widen

KEYS = 128
"""Positions in a tile. Their packed keys and values and the scores of a few rows fit a core's L1 cache."""

LOWEST = np.float32(-3e38)
"""A maximum before the first key. Unlike infinity it leaves a number when it is subtracted from itself."""

TILES = 3
"""Tiles of query rows side by side: one would wait for its scores, then for its weights. Measured with 1 to 4."""

NUM_PEAKS = TILES * TILE_ROWS
"""At least the rows side by side, in whole registers."""

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
TILE_SIZES = 24  # address; only with ``in_tiles``
NUM_PARAMETERS = 25

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
def _pack_queries(query, first_token, num_queries, first_head, group, packed, height):
    """Pack queries by position, then by the heads of a group; rows that pad a tile are zero."""
    for index in range(num_queries):
        for g in range(group):
            source, target = query[first_token + index, first_head + g], packed[index * group + g]
            for d in range(len(source)):
                target[d] = narrow(widen(source[d]), target[d])
    packed[num_queries * group : num_queries * group + height] = 0


@njit(**PART_OPTIONS)
def _mask(place, window, height, width, scale, softcap, scores):
    """Hide from each row the keys that it must not see."""
    row, num_rows, group, first, base, count = place
    for index in range(height):
        position = first + (row + index) // group
        low, high = max(position - window + 1 - base, 0), min(position + 1 - base, count)
        if softcap > 0:
            cap_scores(scores[index], width, scale, softcap)
        if row + index >= num_rows or low >= high:
            low = width
        for t in range(min(low, width)):
            scores[index, t] = -np.inf
        for t in range(max(high, 0), width):
            scores[index, t] = -np.inf


@njit(**PART_OPTIONS)
def _soften(row, height, width, scale, state, scores, weights, softmax):
    """Turn scores into weights relative to the running maxima, and rescale the previous sums to them.

    Scores and maxima are not multiplied with ``scale`` yet. softmax: [3, ``NUM_PEAKS``], scratch.
    """
    sums, maxima, totals = state
    peaks, factors, added = softmax
    for index in range(height):
        peaks[index] = maxima[row + index]
    for index in range(0, height, SIDE):
        raise_peaks(address_of(scores[index]), scores.strides[0], width, address_of(peaks[index:]))
    for start in range(0, height, LANES):
        decay(address_of(maxima[row + start :]), address_of(peaks[start:]), scale, address_of(factors[start:]))
    for index in range(0, height, SIDE):
        rows, targets = address_of(scores[index]), address_of(weights[index])
        at, into = address_of(peaks[index:]), address_of(added[index:])
        soften_rows(rows, scores.strides[0], targets, weights.strides[0], width, at, scale, into, weights[0, 0])
    for index in range(height):
        maxima[row + index] = peaks[index]
        totals[row + index] = totals[row + index] * factors[index] + added[index]
        if factors[index] != np.float32(1.0):
            for d in range(sums.shape[1]):
                sums[row + index, d] *= factors[index]


@njit(**BODY_OPTIONS)
def _attend_rows(place, window, scale, softcap, operands, state, scratch, unit):
    """Process a few tiles of query rows with one tile of keys.

    place: first row, number of rows, heads of a group, the first row's position, the first key's position, number of
        keys.
    """
    row, num_rows, group, first, base, count = place
    queries, keys, values = operands
    scores, weights, softmax = scratch
    tile = rows_of(unit)
    height = min(len(scores), (num_rows - row + tile - 1) // tile * tile)
    scores, weights = scores[:height], weights[:height]
    visible = min(count, first + (min(row + height, num_rows) - 1) // group + 1 - base)
    if visible <= 0 or first + row // group - window + 1 >= base + KEYS:
        return
    width = (visible + COLUMNS - 1) // COLUMNS * COLUMNS
    score(queries, row, keys, width, scores, unit)
    _mask(place, window, height, width, scale, softcap, scores)
    _soften(row, height, width, scale, state, scores, weights, softmax)
    add(weights, width, values, state[0], row, unit)


@njit(**BODY_OPTIONS)
def _attend(p, query, rows, words, output, product, packed, unit):
    """Take (run of queries, key-value head) pairs from the shared counter until none is left.

    query: [num_tokens, num_heads, head_dim]; output: the same with VALUE_DIM; rows: [cache rows, head_dim] in storage
        type; words: the same memory as the product's words; product, packed: [0], they carry the type of the operands
        and of the packed values; unit: [0], see ``run_units``.
    """
    num_kv_heads, group, head_dim, block_size = p[NUM_KV_HEADS], p[GROUP], p[HEAD_DIM], p[BLOCK_SIZE]
    items = carray(pointer(p[ITEMS]), (p[NUM_ITEMS], ITEM_WIDTH), dtype=np.int32)
    tables = carray(pointer(p[TABLES]), (p[NUM_TABLES], p[TABLE_WIDTH]), dtype=np.int32)
    numbers = carray(pointer(p[NUMBERS]), (NUM_SCORE_NUMBERS,), dtype=np.float32)
    scale, softcap = numbers[SCALE], numbers[SOFTCAP]
    sinks = carray(pointer(p[SINKS]), (num_kv_heads * group,), dtype=np.float32)
    height = TILES * rows_of(unit)
    max_rows = p[MAX_QUERIES] * group + height
    width = (head_dim + COLUMNS - 1) // COLUMNS * COLUMNS  # padded with zeros if the head is narrower
    value_width = (p[VALUE_DIM] + COLUMNS - 1) // COLUMNS * COLUMNS
    queries = np.zeros((max_rows, width), dtype=product.dtype)
    sums = np.empty((max_rows, value_width), dtype=np.float32)
    maxima = np.empty(max_rows + NUM_PEAKS, dtype=np.float32)
    totals = np.empty(max_rows, dtype=np.float32)
    softmax = np.empty((3, NUM_PEAKS), dtype=np.float32)
    keys = np.zeros((width * product.itemsize // WORD_BYTES, KEYS), dtype=np.float32)
    values = np.zeros((KEYS * product.itemsize // WORD_BYTES, value_width), dtype=packed.dtype)
    scores = np.empty((height, KEYS), dtype=np.float32)
    weights = np.zeros((height, KEYS), dtype=product.dtype)
    indices = np.empty(KEYS, dtype=np.int64)
    operands, state = (queries, keys, values), (sums, maxima, totals)
    begin(unit, p[TILE_SIZES])
    number = take_next(p[COUNTER])
    while number < p[NUM_ITEMS] * num_kv_heads:
        item, head = items[number // num_kv_heads], number % num_kv_heads
        first, num_queries = np.int64(item[FIRST_POSITION]), np.int64(item[NUM_QUERIES])
        num_rows, table = num_queries * group, tables[item[TABLE]]
        _pack_queries(query, item[FIRST_TOKEN], num_queries, head * group, group, queries, height)
        sums[: num_rows + height] = 0.0
        start_softmax(sinks[head * group :], p[SINKS] != 0, scale, group, maxima[:num_rows], totals)
        for row in range(num_rows + height):
            maxima[row] = max(maxima[row], LOWEST) if row < num_rows else LOWEST
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
            for row in range(0, num_rows, height):
                place = row, num_rows, group, first, base, count
                _attend_rows(place, p[WINDOW], scale, softcap, operands, state, (scores, weights, softmax), unit)
        for row in range(num_rows):
            target = output[item[FIRST_TOKEN] + row // group, head * group + row % group]
            inverse = np.float32(1.0) / totals[row]
            for d in range(p[VALUE_DIM]):
                target[d] = narrow(sums[row, d] * inverse, target[d])
        number = take_next(p[COUNTER])
    finish(unit)


@cache
def compiled_run_attention(dtype, *, has_pairs, in_tiles=False):
    """The address of ``void attend(int64 *parameters)`` for a storage type. With ``has_pairs``, bfloat16 is multiplied
    as such, and by AMX with ``in_tiles``; otherwise everything is multiplied as float32.
    """
    unit = IN_TILES if in_tiles else IN_LANES
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
        _attend(
            p,
            query,
            rows,
            words,
            output,
            np.empty(0, dtype=product),
            np.empty(0, dtype=packed),
            np.empty(0, dtype=unit),
        )

    return compile_kernel(attend)
