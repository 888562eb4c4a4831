"""The most likely token of each row of logits, and whether the row holds a NaN, in one pass, compiled.

Numbers are compared by integers of their own width in the same order, which is what lets the search run in vector
registers, as many at a time as fit; NaN of either sign comes above all others there.
"""

from functools import cache

import numpy as np
from numba import carray, njit

from engine.kernels.compiled import PART_OPTIONS, STORAGE, compile_kernel
from engine.kernels.machine_code import pointer, prefetch, rank, take_next

PART = 512
"""Columns whose maximum is found before it is compared with that of the columns before."""

PREFETCH_BYTES = 8192
"""How far ahead memory is asked for: the machine's own prefetching begins anew in every page, and the logits of a large
batch no longer lie in a cache."""

CACHE_LINE_BYTES = 64

# The fields of the parameter block, all int64.
COUNTER, LOGITS, TOKEN_IDS, HAS_NAN = range(4)  # addresses
NUM_ROWS, SIZE = 4, 5
ANY_NAN = 6  # set to 1 when a row holds a NaN
NUM_PARAMETERS = 7


@njit(**PART_OPTIONS)
def _highest(part, lowest):
    highest = lowest
    for i in range(len(part)):
        number = rank(part[i])
        highest = number if number > highest else highest
    return highest


@njit(**PART_OPTIONS)
def _search(row, lowest):
    """The first column of the highest number, and its rank."""
    highest, found = lowest, 0
    for start in range(0, len(row), PART):
        ahead = row.ctypes.data + start * row.itemsize + PREFETCH_BYTES
        for offset in range(0, PART * row.itemsize, CACHE_LINE_BYTES):
            prefetch(ahead + offset)
        of_part = _highest(row[start : start + PART], lowest)
        if of_part > highest:
            highest, found = of_part, start
    while rank(row[found]) != highest:
        found += 1
    return found, highest


@njit(**PART_OPTIONS)
def _run(p, logits, token_ids, has_nan, lowest):
    """Take rows from the shared counter. logits: [num_rows, size]; token_ids, has_nan: [num_rows]."""
    nan_rank = -(lowest + 1)
    row = take_next(p[COUNTER])
    while row < p[NUM_ROWS]:
        found, highest = _search(logits[row], lowest)
        token_ids[row] = found
        has_nan[row] = highest == nan_rank
        if highest == nan_rank:
            p[ANY_NAN] = 1
        row = take_next(p[COUNTER])


@cache
def compiled_argmax(dtype):
    """The address of ``void argmax(int64 *parameters)`` for logits of a dtype; token_ids are int32, has_nan bool."""
    storage = STORAGE[dtype]
    rank_type = np.int32 if storage is np.float32 else np.int16
    lowest = rank_type(np.iinfo(rank_type).min)

    def argmax(address):
        p = carray(address, (NUM_PARAMETERS,), dtype=np.int64)
        logits = carray(pointer(p[LOGITS]), (p[NUM_ROWS], p[SIZE]), dtype=storage)
        token_ids = carray(pointer(p[TOKEN_IDS]), (p[NUM_ROWS],), dtype=np.int32)
        _run(p, logits, token_ids, carray(pointer(p[HAS_NAN]), (p[NUM_ROWS],), dtype=np.uint8), lowest)

    return compile_kernel(argmax)
