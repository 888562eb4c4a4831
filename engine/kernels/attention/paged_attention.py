"""Compiled paged attention for single queries: reads the blocks in place and never gathers them.

Source: Kwon et al., PagedAttention, SOSP 2023; Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import carray, njit, types
from numba.extending import overload

from engine.kernels.attention.key_loops import KEYS, VECTORS, add_register, add_values, score_keys
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
from engine.kernels.lanes import LANES
from engine.kernels.machine_code import address_of, narrow, pointer, prefetch_to_second, take_next, widen
from engine.kernels.row_loops import highest_score, soften_row

TILE = 32
"""Positions that are scored before the running maximum is updated; a multiple of ``KEYS`` and ``LANES``."""

LINE_BYTES = 64

# The fields of the parameter block, all int64.
COUNTER, QUERY, OUTPUT, TABLES, POSITIONS, ROWS = range(6)  # addresses
NUM_ROWS, TABLE_WIDTH = 6, 7
NUM_KV_HEADS, GROUP, HEAD_DIM = 8, 9, 10
NUM_CACHE_ROWS, BLOCK_SIZE, BLOCK_ROWS, HEAD_ROWS = 11, 12, 13, 14
FIRST_ROW, WINDOW = 15, 16
NUMBERS, SINKS = (
    17,
    18,
)  # addresses of float32: ``NUM_SCORE_NUMBERS`` numbers; the sinks of all heads, 0 for none
VALUE_DIM, VALUE_ROWS = 19, 20  # size of a value; its distance from its key in cache rows, 0: it is part of the key
NUM_PARAMETERS = 21


def _locate(p, rows, indices, count, tile, addresses):
    """Write the addresses of a tile's rows; returns a number of their type."""


@overload(_locate)
def _choose_locate(p, rows, indices, count, tile, addresses):
    """The rows' addresses in the cache, or in the tile that they are copied to, if there is one."""
    del p, rows, indices, count, addresses
    return _locate_in_cache if tile.dtype == types.uint8 else _copy_to_tile


def _locate_in_cache(p, rows, indices, count, tile, addresses):
    row_bytes = p[HEAD_DIM] * rows.itemsize
    for t in range(count):
        addresses[t] = p[ROWS] + indices[t] * row_bytes
    return rows[0, 0]


def _copy_to_tile(p, rows, indices, count, tile, addresses):
    """For rows that do not fill whole registers: copies them to the tile, whose rows do, as float32."""
    for t in range(count):
        source, target = rows[indices[t]], tile[t]
        for d in range(len(source)):
            target[d] = widen(source[d])
        addresses[t] = address_of(tile) + t * tile.strides[0]
    return tile[0, 0]


@njit(**PART_OPTIONS)
def _heads_at_once(left):
    """How many of the remaining query heads go through a tile together."""
    return 2 if left == 4 else min(left, 3)


@njit(**PART_OPTIONS)
def _score_tile(queries, addresses, count, softcap, scores, like):
    """Dot products of each query of the group with each key of the tile, capped if there is a softcap. The tile's
    unused places get -inf.
    """
    group, stride = queries.shape[0], queries.strides[0]
    whole = (count + KEYS - 1) // KEYS * KEYS
    addresses[count:whole] = addresses[0]
    first_head = 0
    while first_head < group:
        num_heads = _heads_at_once(group - first_head)
        query = address_of(queries) + first_head * stride
        for t in range(0, count, KEYS):
            row, place = address_of(addresses[t:]), address_of(scores[first_head, t:])
            score_keys(num_heads, query, stride, row, queries.shape[1], place, scores.strides[0], like)
        first_head += num_heads
    if softcap > 0:
        for g in range(group):
            cap_scores(scores[g], count, np.float32(1.0), softcap)
    scores[:, count:] = -np.inf


@njit(**PART_OPTIONS)
def _soften_tile(scores, maxima, totals, sums):
    """Turn scores into weights relative to the running maximum, and rescale the previous sums to it."""
    for g in range(scores.shape[0]):
        row = address_of(scores[g])
        highest = highest_score(row, TILE, maxima[g])
        correction = exp(maxima[g] - highest)
        total = soften_row(row, row, TILE, highest, np.float32(1.0), scores[g, 0])
        maxima[g] = highest
        totals[g] = totals[g] * correction + total
        if correction != np.float32(1.0):
            target = sums[g]
            for d in range(len(target)):
                target[d] *= correction


@njit(**PART_OPTIONS)
def _add_tile(scores, addresses, count, sums, like):
    """Add the tile's values, multiplied by their weights."""
    group, stride = sums.shape[0], sums.strides[0]
    weights, rows, at_once = address_of(scores), address_of(addresses), VECTORS * LANES
    first_head = 0
    while first_head < group:
        num_heads = _heads_at_once(group - first_head)
        weight, target = weights + first_head * scores.strides[0], address_of(sums) + first_head * stride
        d = 0
        while d < sums.shape[1]:
            if d + at_once <= sums.shape[1]:
                add_values(num_heads, weight, scores.strides[0], rows, count, d, target, stride, like)
                d += at_once
            else:
                add_register(num_heads, weight, scores.strides[0], rows, count, d, target, stride, like)
                d += LANES
        first_head += num_heads


@njit(**PART_OPTIONS)
def _span(p, position):
    """The range of positions that a query attends to: the first one, and the one after the last."""
    return max(position + 1 - p[WINDOW], 0), np.int64(position) + 1


@njit(**PART_OPTIONS)
def _find_rows(p, table, head, start, end, indices):
    """Find the cache rows of a head's keys in the tile that begins at ``start``; their values lie VALUE_ROWS further.
    Returns the number of rows.
    """
    count, first = min(TILE, end - start), head * p[HEAD_ROWS] + p[FIRST_ROW]
    block, offset = start // p[BLOCK_SIZE], start % p[BLOCK_SIZE]
    t = 0
    while t < count:
        row = table[block] * p[BLOCK_ROWS] + first + offset
        for index in range(t, min(t + p[BLOCK_SIZE] - offset, count)):
            indices[index] = row + index - t
        t += p[BLOCK_SIZE] - offset
        block, offset = block + 1, 0
    return count


@njit(**PART_OPTIONS)
def _take_over(indices, count):
    """Move on: the rows of the next tile become those of this one."""
    for t in range(count):
        indices[t] = indices[TILE + t]


@njit(**PART_OPTIONS)
def _prefetch_rows(p, rows, indices, count, behind):
    """Prefetch rows at a distance of ``behind`` rows from the indices. A block ends before the hardware prefetcher can
    guess where the next one is.
    """
    num_bytes = p[HEAD_DIM] * rows.itemsize
    for t in range(count):
        for offset in range(0, num_bytes, LINE_BYTES):
            prefetch_to_second(p[ROWS] + (indices[t] + behind) * num_bytes + offset)


@njit(**PART_OPTIONS)
def _scale_queries(query, scale, queries):
    for g in range(query.shape[0]):
        for d in range(query.shape[1]):
            queries[g, d] = widen(query[g, d]) * scale


@njit(**PART_OPTIONS)
def _write(sums, totals, output):
    for g in range(output.shape[0]):
        inverse = np.float32(1.0) / totals[g]
        for d in range(output.shape[1]):
            output[g, d] = narrow(sums[g, d] * inverse, output[g, d])


@njit(**BODY_OPTIONS)
def _attend(p, query, rows, output, tile_type):
    """Take (row, key-value head) pairs from the shared counter until none is left.

    query: [num_rows * num_kv_heads, group, head_dim]; output: the same with VALUE_DIM; rows: [cache rows, head_dim] in
        storage type; tile_type: [0], float32 if rows are copied to a tile, else uint8. A query attends to all positions
        up to its own, included.
    """
    num_kv_heads, group, head_dim = p[NUM_KV_HEADS], p[GROUP], p[HEAD_DIM]
    value_dim, value_rows = p[VALUE_DIM], p[VALUE_ROWS]
    tables = carray(pointer(p[TABLES]), (p[NUM_ROWS], p[TABLE_WIDTH]), dtype=np.int32)
    positions = carray(pointer(p[POSITIONS]), (p[NUM_ROWS],), dtype=np.int32)
    numbers = carray(pointer(p[NUMBERS]), (NUM_SCORE_NUMBERS,), dtype=np.float32)
    scale, softcap = numbers[SCALE], numbers[SOFTCAP]
    sinks = carray(pointer(p[SINKS]), (num_kv_heads * group,), dtype=np.float32)
    width = (head_dim + LANES - 1) // LANES * LANES  # padded with zeros if the head is narrower
    queries = np.zeros((group, width), dtype=np.float32)
    sums = np.empty((group, (value_dim + LANES - 1) // LANES * LANES), dtype=np.float32)
    scores = np.empty((group, TILE), dtype=np.float32)
    tile = np.zeros((TILE, width), dtype=tile_type.dtype)
    maxima = np.empty(group, dtype=np.float32)
    totals = np.empty(group, dtype=np.float32)
    indices = np.empty(2 * TILE, dtype=np.int64)
    addresses = np.empty(TILE, dtype=np.int64)
    num_items = p[NUM_ROWS] * num_kv_heads
    item = take_next(p[COUNTER])
    if item < num_items:
        start, end = _span(p, positions[item // num_kv_heads])
        _find_rows(p, tables[item // num_kv_heads], item % num_kv_heads, start, end, indices)
    while item < num_items:
        head, following = item % num_kv_heads, item
        _scale_queries(query[item], scale, queries)
        sums[:] = 0.0
        start_softmax(sinks[head * group :], p[SINKS] != 0, np.float32(1.0), group, maxima, totals)
        while following == item:
            count, num_next = min(TILE, end - start), 0
            start += TILE
            if start >= end:
                following = take_next(p[COUNTER])
                if following < num_items:
                    start, end = _span(p, positions[following // num_kv_heads])
            if following < num_items:
                request, its_head = following // num_kv_heads, following % num_kv_heads
                num_next = _find_rows(p, tables[request], its_head, start, end, indices[TILE:])
            like = _locate(p, rows, indices, count, tile, addresses)
            _score_tile(queries, addresses, count, softcap, scores, like)
            _prefetch_rows(p, rows, indices[TILE:], num_next, 0)
            _soften_tile(scores, maxima, totals, sums)
            if value_rows > 0:
                add_to_each(indices, count, value_rows)
                _locate(p, rows, indices, count, tile, addresses)
            _add_tile(scores, addresses, count, sums, like)
            if value_rows > 0:
                _prefetch_rows(p, rows, indices[TILE:], num_next, value_rows)
            _take_over(indices, num_next)
        _write(sums, totals, output[item])
        item = following


@cache
def compiled_attention(dtype: str, *, fills_registers: bool) -> int:
    """The address of ``void attend(int64 *parameters)`` for a storage type.

    fills_registers: the size of a cache row is a multiple of ``LANES``.
    """
    storage, tile_type = STORAGE[dtype], np.uint8 if fills_registers else np.float32

    def attend(address):
        p = carray(address, (NUM_PARAMETERS,), dtype=np.int64)
        num_items, group = p[NUM_ROWS] * p[NUM_KV_HEADS], p[GROUP]
        query = carray(pointer(p[QUERY]), (num_items, group, p[HEAD_DIM]), dtype=storage)
        output = carray(pointer(p[OUTPUT]), (num_items, group, p[VALUE_DIM]), dtype=storage)
        rows = carray(pointer(p[ROWS]), (p[NUM_CACHE_ROWS], p[HEAD_DIM]), dtype=storage)
        _attend(p, query, rows, output, np.empty(0, dtype=tile_type))

    return compile_kernel(attend)
