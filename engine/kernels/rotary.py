"""From the fused projection to attention's input in one compiled pass: norms of heads, rotation, cache write."""

from functools import cache

import numpy as np
from numba import carray, njit

from engine.kernels.compiled import BODY_OPTIONS, PART_OPTIONS, STORAGE, compile_kernel
from engine.kernels.lanes import LANES
from engine.kernels.machine_code import address_of, narrow, pointer, take_next, widen
from engine.kernels.norms import NUM_NORM_NUMBERS, normalize
from engine.kernels.row_loops import rotate_row

# The fields of the parameter block, all int64.
COUNTER, HEADS, QUERY, POSITIONS, TABLE, SLOTS, ROWS = range(7)  # addresses
QUERY_NORM, KEY_NORM, NUMBERS = 7, 8, 9  # addresses; the norms may be 0 for none, NUMBERS are those of ``norms``
NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 10, 11, 12, 13
NUM_POSITIONS, NUM_CACHE_ROWS, FIRST_KEY, BLOCK_ROWS, HEAD_ROWS, BLOCK_SIZE = 14, 15, 16, 17, 18, 19
HALF = 20  # rotated pairs of a head
NUM_PARAMETERS = 21


@njit(**PART_OPTIONS)
def _copy(source, target):
    for d in range(len(source)):
        target[d] = source[d]


@njit(**PART_OPTIONS)
def _rotate(vector, cosine, sine, target):
    """Rotate the first numbers of a head, one pair for each cosine and sine, and copy the rest."""
    half = len(cosine)
    for d in range(2 * half, len(target)):
        target[d] = narrow(widen(vector[d]), target[d])
    if half > 0 and half % LANES == 0:
        addresses = address_of(vector), address_of(cosine), address_of(sine), address_of(target)
        rotate_row(addresses[0], vector[0], addresses[1], addresses[2], addresses[3], half, target[0])
        return
    for d in range(half):
        first, second = widen(vector[d]), widen(vector[half + d])
        c, s = widen(cosine[d]), widen(sine[d])
        target[d] = narrow(first * c - second * s, target[d])
        target[half + d] = narrow(second * c + first * s, target[d])


@njit(**BODY_OPTIONS)
def _run(p, heads, query, table, rows, query_norm, key_norm):
    """Take tokens from the shared counter until none is left.

    heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], its keys are rotated in place; query: [num_tokens,
        num_heads, head_dim]; table: [num_positions, 2, HALF]; rows: the cache, [num_cache_rows, head_dim]. A block has
        BLOCK_ROWS rows, and each of its heads HEAD_ROWS: a layer's keys begin at row FIRST_KEY, followed by its values.
    """
    num_heads, num_kv_heads, head_dim, block_size = p[NUM_HEADS], p[NUM_KV_HEADS], p[HEAD_DIM], p[BLOCK_SIZE]
    positions = carray(pointer(p[POSITIONS]), (p[NUM_TOKENS],), dtype=np.int64)
    slots = carray(pointer(p[SLOTS]), (p[NUM_TOKENS],), dtype=np.int64)
    numbers = carray(pointer(p[NUMBERS]), (NUM_NORM_NUMBERS,), dtype=np.float32)
    vector = np.empty(head_dim, dtype=np.float32)
    token = take_next(p[COUNTER])
    while token < p[NUM_TOKENS]:
        cosine, sine = table[positions[token], 0], table[positions[token], 1]
        for head in range(num_heads + num_kv_heads):
            is_query = head < num_heads
            target = query[token, head] if is_query else heads[token, head]
            if p[QUERY_NORM if is_query else KEY_NORM] == 0:
                _rotate(heads[token, head], cosine, sine, target)
            else:
                normalize(heads[token, head], query_norm if is_query else key_norm, numbers, head_dim, vector)
                _rotate(vector, cosine, sine, target)
        block, offset = slots[token] // block_size, slots[token] % block_size
        first_row = block * p[BLOCK_ROWS] + p[FIRST_KEY] + offset
        for head in range(num_kv_heads):
            key_row = first_row + head * p[HEAD_ROWS]
            _copy(heads[token, num_heads + head], rows[key_row])
            _copy(heads[token, num_heads + num_kv_heads + head], rows[key_row + block_size])
        token = take_next(p[COUNTER])


@cache
def compiled_rotation(dtype):
    """The address of ``void rotate(int64 *parameters)`` for tensors of a dtype."""
    storage = STORAGE[dtype]

    def rotate(address):
        p = carray(address, (NUM_PARAMETERS,), dtype=np.int64)
        head_dim = p[HEAD_DIM]
        num_rows = p[NUM_HEADS] + 2 * p[NUM_KV_HEADS]
        heads = carray(pointer(p[HEADS]), (p[NUM_TOKENS], num_rows, head_dim), dtype=storage)
        query = carray(pointer(p[QUERY]), (p[NUM_TOKENS], p[NUM_HEADS], head_dim), dtype=storage)
        table = carray(pointer(p[TABLE]), (p[NUM_POSITIONS], 2, p[HALF]), dtype=storage)
        rows = carray(pointer(p[ROWS]), (p[NUM_CACHE_ROWS], head_dim), dtype=storage)
        query_norm = carray(pointer(p[QUERY_NORM]), (head_dim,), dtype=storage)
        key_norm = carray(pointer(p[KEY_NORM]), (head_dim,), dtype=storage)
        _run(p, heads, query, table, rows, query_norm, key_norm)

    return compile_kernel(rotate)
