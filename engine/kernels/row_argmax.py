"""The most likely token of each row of logits, within the row's mask if it has one, and whether the row holds a NaN.

Numbers are compared as integers of the same width and order, which vectorises well; NaN of either sign ranks highest. A
row with a mask is first searched without it. Only if the mask forbids the result is the row searched again, now from a
cache, skipping mask words that allow nothing.
"""

from functools import cache

import numpy as np
from numba import carray, njit

from engine.kernels.compiled import BODY_OPTIONS, PART_OPTIONS, STORAGE, compile_kernel
from engine.kernels.machine_code import address_of, pointer, prefetch, rank, take_next, widen

PART = 512
"""Columns whose maximum is found before it is compared with that of earlier columns."""

PREFETCH_BYTES = 8192
"""Prefetch distance. The hardware prefetcher restarts in every page, and the logits of a large batch fit no cache."""

CACHE_LINE_BYTES = 64

WORD_BITS = 32

LOWEST_CERTAIN = np.float32(-1e28)
"""Numbers up to this one count as minus infinity. If a row's maximum is not above it, callers find the token."""

# The fields of the parameter block, all int64.
COUNTER, LOGITS, TOKEN_IDS, HAS_NAN = range(4)  # addresses
NUM_ROWS, SIZE = 4, 5
ANY_NAN = 6  # set to 1 if any row holds a NaN
NUM_PARAMETERS = 7

# Fields of the masked search; the first six are the same.
PLACES, WORDS, IS_OPEN = 6, 7, 8  # addresses
NUM_MASKS, NUM_WORDS = 9, 10
NUM_MASKED_PARAMETERS = 11


@njit(**PART_OPTIONS)
def _highest(part, lowest):
    highest = lowest
    for i in range(len(part)):
        number = rank(part[i])
        highest = number if number > highest else highest
    return highest


@njit(**PART_OPTIONS)
def _search(row, lowest):
    """The first column with the highest number, and its rank."""
    highest, found = lowest, 0
    for start in range(0, len(row), PART):
        ahead = address_of(row) + start * row.itemsize + PREFETCH_BYTES
        for offset in range(0, PART * row.itemsize, CACHE_LINE_BYTES):
            prefetch(ahead + offset)
        of_part = _highest(row[start : start + PART], lowest)
        if of_part > highest:
            highest, found = of_part, start
    while rank(row[found]) != highest:
        found += 1
    return found, highest


@njit(**BODY_OPTIONS)
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


@njit(**PART_OPTIONS)
def _is_allowed(words, token_id):
    word = token_id // WORD_BITS
    return word < len(words) and (words[word] >> np.int32(token_id % WORD_BITS)) & np.int32(1) == np.int32(1)


@njit(**PART_OPTIONS)
def _highest_allowed(part, words, lowest):
    """The highest rank of the allowed columns; ``part`` begins at the first bit of ``words``."""
    highest = lowest
    for number in range(len(words)):
        word = words[number]
        if word == 0:
            continue
        start = number * WORD_BITS
        for i in range(start, min(start + WORD_BITS, len(part))):
            found = rank(part[i])
            allowed = (word >> np.int32(i - start)) & np.int32(1)
            found = found if allowed != 0 else lowest
            highest = found if found > highest else highest
    return highest


@njit(**PART_OPTIONS)
def _search_allowed(row, words, lowest):
    """The first allowed column with the highest number among the allowed ones; -1 if none is allowed."""
    highest, found = lowest, 0
    size = min(len(row), len(words) * WORD_BITS)
    for start in range(0, size, PART):
        end = min(start + PART, size)
        first = start // WORD_BITS
        of_part = _highest_allowed(row[start:end], words[first : (end + WORD_BITS - 1) // WORD_BITS], lowest)
        if of_part > highest:
            highest, found = of_part, start
    if highest == lowest:
        return -1
    while rank(row[found]) != highest or not _is_allowed(words, found):
        found += 1
    return found


@njit(**BODY_OPTIONS)
def _run_masked(p, logits, places, masks, token_ids, has_nan, is_open, lowest):
    """Take rows from the shared counter. places: [num_rows] the row's mask, or -1; is_open: [num_rows], see below."""
    nan_rank = -(lowest + 1)
    row = take_next(p[COUNTER])
    while row < p[NUM_ROWS]:
        found, highest = _search(logits[row], lowest)
        has_nan[row] = highest == nan_rank
        is_open[row] = highest == nan_rank
        place = places[row]
        if place >= 0 and highest != nan_rank:
            words = masks[place]
            if not _is_allowed(words, found):
                found = _search_allowed(logits[row], words, lowest)
            if found < 0:
                found, is_open[row] = 0, 1
            else:
                value = widen(logits[row, found])
                is_open[row] = not (LOWEST_CERTAIN < value < np.float32(np.inf))
        token_ids[row] = found
        row = take_next(p[COUNTER])


@cache
def compiled_masked_argmax(dtype):
    """The address of ``void argmax(int64 *parameters)`` for logits of a dtype.

    places: [num_rows] int32, index of the row's mask, -1 for none; words: [num_masks, num_words] int32. Written:
        token_ids [num_rows] int32, has_nan and is_open [num_rows] bool. The token of an open row is undefined: the row
        holds a NaN, or no allowed number is finite and clearly above minus infinity.
    """
    storage = STORAGE[dtype]
    rank_type = np.int32 if storage is np.float32 else np.int16
    lowest = rank_type(np.iinfo(rank_type).min)

    def argmax(address):
        p = carray(address, (NUM_MASKED_PARAMETERS,), dtype=np.int64)
        rows = p[NUM_ROWS]
        logits = carray(pointer(p[LOGITS]), (rows, p[SIZE]), dtype=storage)
        places = carray(pointer(p[PLACES]), (rows,), dtype=np.int32)
        masks = carray(pointer(p[WORDS]), (p[NUM_MASKS], p[NUM_WORDS]), dtype=np.int32)
        token_ids = carray(pointer(p[TOKEN_IDS]), (rows,), dtype=np.int32)
        has_nan = carray(pointer(p[HAS_NAN]), (rows,), dtype=np.uint8)
        is_open = carray(pointer(p[IS_OPEN]), (rows,), dtype=np.uint8)
        _run_masked(p, logits, places, masks, token_ids, has_nan, is_open, lowest)

    return compile_kernel(argmax)
