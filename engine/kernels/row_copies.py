"""Compiled copies of rows: looked up in an embedding and scaled, or into other numbers or a wider tensor."""

from functools import cache

import numpy as np
from numba import carray, njit

from engine.kernels.compiled import BODY_OPTIONS, STORAGE, compile_kernel
from engine.kernels.machine_code import narrow, pointer, take_next, widen

COUNTER = 0  # the first field of both parameter blocks, which are all int64

TOKEN_IDS, TABLE, EMBEDDED, NUMBERS = range(1, 5)  # addresses
NUM_TOKENS, VOCAB_SIZE, EMBEDDED_SIZE = 5, 6, 7
NUM_EMBEDDING_PARAMETERS = 8

SCALE = 0
NUM_EMBEDDING_NUMBERS = 1
"""An embedding's only float32 number: what its rows are multiplied with."""

SOURCE, TARGET = 1, 2  # addresses
NUM_ROWS, SIZE, SOURCE_STRIDE, TARGET_STRIDE = 3, 4, 5, 6  # strides of rows, in elements
NUM_COPY_PARAMETERS = 7


@njit(**BODY_OPTIONS)
def _embed(p, token_ids, table, output):
    """Take tokens from the shared counter until none is left. An id that is no token gets zeros."""
    scale = carray(pointer(p[NUMBERS]), (NUM_EMBEDDING_NUMBERS,), dtype=np.float32)[SCALE]
    token = take_next(p[COUNTER])
    while token < p[NUM_TOKENS]:
        row = token_ids[token]
        if 0 <= row < p[VOCAB_SIZE]:
            for index in range(p[EMBEDDED_SIZE]):
                output[token, index] = narrow(widen(table[row, index]) * scale, table[row, index])
        else:
            output[token, :] = 0
        token = take_next(p[COUNTER])


@cache
def compiled_embedding(dtype):
    """The address of ``void embed(int64 *parameters)`` for a table of a dtype, [vocab_size, size].

    The ids are int64, [num_tokens]; EMBEDDED is [num_tokens, size].
    """
    storage = STORAGE[dtype]

    def embed(address):
        p = carray(address, (NUM_EMBEDDING_PARAMETERS,), dtype=np.int64)
        token_ids = carray(pointer(p[TOKEN_IDS]), (p[NUM_TOKENS],), dtype=np.int64)
        table = carray(pointer(p[TABLE]), (p[VOCAB_SIZE], p[EMBEDDED_SIZE]), dtype=storage)
        output = carray(pointer(p[EMBEDDED]), (p[NUM_TOKENS], p[EMBEDDED_SIZE]), dtype=storage)
        _embed(p, token_ids, table, output)

    return compile_kernel(embed)


@njit(**BODY_OPTIONS)
def _copy(p, source, target):
    """Take rows from the shared counter until none is left."""
    row = take_next(p[COUNTER])
    while row < p[NUM_ROWS]:
        for index in range(p[SIZE]):
            target[row, index] = narrow(widen(source[row, index]), target[row, index])
        row = take_next(p[COUNTER])


@cache
def compiled_copy(from_dtype, to_dtype):
    """The address of ``void copy(int64 *parameters)``: rows of SIZE numbers, rounded to the other dtype."""
    from_storage, to_storage = STORAGE[from_dtype], STORAGE[to_dtype]

    def copy(address):
        p = carray(address, (NUM_COPY_PARAMETERS,), dtype=np.int64)
        source = carray(pointer(p[SOURCE]), (p[NUM_ROWS], p[SOURCE_STRIDE]), dtype=from_storage)
        target = carray(pointer(p[TARGET]), (p[NUM_ROWS], p[TARGET_STRIDE]), dtype=to_storage)
        _copy(p, source, target)

    return compile_kernel(copy)
