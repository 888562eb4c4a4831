"""Paged attention of single queries, compiled: reads the blocks in place and never gathers them.

Source: Kwon et al., PagedAttention, SOSP 2023; Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import carray, njit

from engine.kernels.compiled import (
    NUM_SCORE_NUMBERS,
    PART_OPTIONS,
    SCALE,
    SOFTCAP,
    STORAGE,
    cap_scores,
    compile_kernel,
    exp,
    start_softmax,
)
from engine.kernels.machine_code import narrow, pointer, prefetch, take_next, widen

TILE = 32
"""Positions that are scored before the running maximum is corrected: keys and values of a tile stay in L1."""

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
VALUE_DIM, VALUE_ROWS = 19, 20  # numbers of a value; how many cache rows it is behind its key, 0: it is part of that
NUM_PARAMETERS = 21


@njit(**PART_OPTIONS)
def _load_tile(rows, indices, count, tile):
    for t in range(count):
        source = rows[indices[t]]
        target = tile[t]
        for d in range(len(target)):
            target[d] = widen(source[d])
    for t in range(count, (count + 3) // 4 * 4):
        tile[t] = 0.0


@njit(**PART_OPTIONS)
def _score_tile(query, tile, count, softcap, scores):
    """Dot products of each query of the group with each key of the tile, four keys at a time; capped, if at all."""
    head_dim = query.shape[1]
    for g in range(query.shape[0]):
        q = query[g]
        for t in range(0, count, 4):
            a, b, c, e = tile[t], tile[t + 1], tile[t + 2], tile[t + 3]
            sum_a = sum_b = sum_c = sum_e = np.float32(0.0)
            for d in range(head_dim):
                sum_a += q[d] * a[d]
                sum_b += q[d] * b[d]
                sum_c += q[d] * c[d]
                sum_e += q[d] * e[d]
            scores[g, t], scores[g, t + 1], scores[g, t + 2], scores[g, t + 3] = sum_a, sum_b, sum_c, sum_e
        if softcap > 0:
            cap_scores(scores[g], count, np.float32(1.0), softcap)


@njit(**PART_OPTIONS)
def _soften_tile(scores, count, maxima, totals, sums):
    """Turn scores into weights relative to the running maximum, and bring what was summed so far to it."""
    for g in range(scores.shape[0]):
        row = scores[g]
        highest = maxima[g]
        for t in range(count):
            highest = row[t] if row[t] > highest else highest
        correction = exp(maxima[g] - highest)
        total = np.float32(0.0)
        for t in range(count):
            weight = exp(row[t] - highest)
            row[t] = weight
            total += weight
        for t in range(count, TILE):
            row[t] = np.float32(0.0)
        maxima[g] = highest
        totals[g] = totals[g] * correction + total
        target = sums[g]
        for d in range(len(target)):
            target[d] *= correction


@njit(**PART_OPTIONS)
def _add_tile(scores, tile, count, sums):
    """Add the tile's values by their weights, four at a time; weights past ``count`` are zero."""
    for g in range(sums.shape[0]):
        target = sums[g]
        for t in range(0, count, 4):
            a, b, c, e = tile[t], tile[t + 1], tile[t + 2], tile[t + 3]
            weight_a, weight_b, weight_c, weight_e = scores[g, t], scores[g, t + 1], scores[g, t + 2], scores[g, t + 3]
            for d in range(len(target)):
                target[d] += weight_a * a[d] + weight_b * b[d] + weight_c * c[d] + weight_e * e[d]


@njit(**PART_OPTIONS)
def _key_row(p, table, head, position):
    """The cache row of a head's key at a position; that of its value is VALUE_ROWS behind."""
    block, offset = position // p[BLOCK_SIZE], position % p[BLOCK_SIZE]
    return table[block] * p[BLOCK_ROWS] + head * p[HEAD_ROWS] + p[FIRST_ROW] + offset


@njit(**PART_OPTIONS)
def _prefetch_row(p, rows, row):
    """A block ends before the machine has guessed where the next rows are."""
    num_bytes = p[HEAD_DIM] * rows.itemsize
    for offset in range(0, num_bytes, LINE_BYTES):
        prefetch(p[ROWS] + row * num_bytes + offset)


@njit(**PART_OPTIONS)
def _attend(p, query, rows, output):
    """Take (row, key-value head) pairs from the shared counter until none is left.

    query: [num_rows * num_kv_heads, group, head_dim]; output: the same of VALUE_DIM; rows: [cache rows, head_dim] in
    storage type. A query attends to all up to its position, itself included.
    """
    num_kv_heads, group, head_dim = p[NUM_KV_HEADS], p[GROUP], p[HEAD_DIM]
    value_dim, value_rows = p[VALUE_DIM], p[VALUE_ROWS]
    tables = carray(pointer(p[TABLES]), (p[NUM_ROWS], p[TABLE_WIDTH]), dtype=np.int32)
    positions = carray(pointer(p[POSITIONS]), (p[NUM_ROWS],), dtype=np.int32)
    numbers = carray(pointer(p[NUMBERS]), (NUM_SCORE_NUMBERS,), dtype=np.float32)
    scale, softcap = numbers[SCALE], numbers[SOFTCAP]
    sinks = carray(pointer(p[SINKS]), (num_kv_heads * group,), dtype=np.float32)
    queries = np.empty((group, head_dim), dtype=np.float32)
    sums = np.empty((group, value_dim), dtype=np.float32)
    scores = np.zeros((group, TILE), dtype=np.float32)
    tile = np.zeros((TILE, head_dim), dtype=np.float32)
    maxima = np.empty(group, dtype=np.float32)
    totals = np.empty(group, dtype=np.float32)
    indices = np.empty(TILE, dtype=np.int64)
    item = take_next(p[COUNTER])
    while item < p[NUM_ROWS] * num_kv_heads:
        request, head = item // num_kv_heads, item % num_kv_heads
        for g in range(group):
            for d in range(head_dim):
                queries[g, d] = widen(query[item, g, d]) * scale
        sums[:] = 0.0
        start_softmax(sinks[head * group :], p[SINKS] != 0, np.float32(1.0), group, maxima, totals)
        table, end = tables[request], positions[request] + 1
        for start in range(max(end - p[WINDOW], 0), end, TILE):
            count = min(TILE, end - start)
            for t in range(count):
                indices[t] = _key_row(p, table, head, start + t)
                _prefetch_row(p, rows, indices[t] + value_rows)
            for t in range(start + count, min(start + 2 * TILE, end)):
                _prefetch_row(p, rows, _key_row(p, table, head, t))
            _load_tile(rows, indices, count, tile)
            _score_tile(queries, tile, count, softcap, scores)
            _soften_tile(scores, count, maxima, totals, sums)
            if value_rows > 0:
                indices[:count] += value_rows
                _load_tile(rows, indices, count, tile)
            _add_tile(scores, tile, count, sums)
        for g in range(group):
            inverse = np.float32(1.0) / totals[g]
            for d in range(value_dim):
                output[item, g, d] = narrow(sums[g, d] * inverse, output[item, g, d])
        item = take_next(p[COUNTER])


@cache
def compiled_attention(dtype: str) -> int:
    """The address of ``void attend(int64 *parameters)`` for a storage type."""
    storage = STORAGE[dtype]

    def attend(address):
        p = carray(address, (NUM_PARAMETERS,), dtype=np.int64)
        num_items, group = p[NUM_ROWS] * p[NUM_KV_HEADS], p[GROUP]
        query = carray(pointer(p[QUERY]), (num_items, group, p[HEAD_DIM]), dtype=storage)
        output = carray(pointer(p[OUTPUT]), (num_items, group, p[VALUE_DIM]), dtype=storage)
        _attend(p, query, carray(pointer(p[ROWS]), (p[NUM_CACHE_ROWS], p[HEAD_DIM]), dtype=storage), output)

    return compile_kernel(attend)
