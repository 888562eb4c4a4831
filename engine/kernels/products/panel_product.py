"""Compiled products with a weight in panels, for CPUs with fused multiply-add.

A panel holds ``PANEL`` rows of the weight side by side, [num_words, PANEL]. One pass over it computes ``PANEL`` columns
of the output for up to ``MAX_ROWS`` rows of the input. A word is one number, or a pair that one instruction multiplies
(``tile_product``). Each sum runs over the input in order, whatever the number of rows: a row's result does not depend
on the rest of the batch.
"""

from functools import cache

import numpy as np
from numba import carray, njit

from engine.kernels.compiled import BODY_OPTIONS, STORAGE, compile_kernel
from engine.kernels.machine_code import address_of, take_next
from engine.kernels.products.best_columns import forget_best, keep_best, publish_best
from engine.kernels.products.tile_product import MAX_ROWS, PANEL, UNROLLED, WORD_BYTES, multiply_tile
from engine.kernels.row_loops import convert_row

CHUNK_BYTES = 3 << 19
"""Bytes of the input that go through a panel before the next panel is loaded: they stay in a core's own cache."""

BLOCK_WORDS = 768
"""Most words of the input that all rows of such a chunk process before the next words: that part of a panel stays in a
core's own cache. Measured with 192 to 2048."""

WIDENING_ROWS = 4 * MAX_ROWS
"""From so many rows on, a two-byte weight is converted to float32 once for all tiles, not again in each tile."""

FLOAT32, FLOAT32_BYTES = np.float32(0), 4
SUMS_STRIDE = PANEL * FLOAT32_BYTES

# The fields of the parameter block, all int64.
COUNTER, INPUT, PANELS, BIAS, OUTPUT = range(5)  # addresses
NUM_ROWS, NUM_WORDS, OUT_SIZE = 5, 6, 7
INPUT_STRIDE = 8  # bytes
TILE_SIZES = 9  # address; only ``amx_product`` reads it
BEST = 10  # 0, or the address of the rows' keys (``best_columns``): then these are written instead of the output
HAS_NAN = 11  # set to 1 if the highest number of a row is NaN, as one NaN in a row is; only with ``BEST``
NUM_PARAMETERS = 12


@njit(**BODY_OPTIONS)
def _multiply(p, index, row, end, sums, wide, leaders, weight, weight_bytes, output, output_bytes):
    """Rows ``row`` to ``end`` of the input times one panel, block of words by block of words.

    sums: [end - row, PANEL], scratch for partial sums. wide: [BLOCK_WORDS, PANEL], scratch for a block of the panel in
        float32. leaders: see ``keep_best``; of all rows.
    """
    x_stride, y_stride = p[INPUT_STRIDE], output_bytes * p[OUT_SIZE]
    panel = p[PANELS] + index * p[NUM_WORDS] * PANEL * weight_bytes
    y = p[OUTPUT] + row * y_stride + index * PANEL * output_bytes
    start, start_stride, word = p[BIAS] + index * PANEL * FLOAT32_BYTES, 0, 0
    for num_left in range((p[NUM_WORDS] + BLOCK_WORDS - 1) // BLOCK_WORDS, 0, -1):
        width = (p[NUM_WORDS] - word + UNROLLED * num_left - 1) // (UNROLLED * num_left) * UNROLLED
        x, part = p[INPUT] + row * x_stride + word * WORD_BYTES, panel + word * PANEL * weight_bytes
        is_last = num_left == 1 and output_bytes == FLOAT32_BYTES and p[BEST] == 0
        target, target_stride = (y, y_stride) if is_last else (sums, SUMS_STRIDE)
        if weight_bytes != FLOAT32_BYTES and end - row >= WIDENING_ROWS:
            convert_row(part, wide, width * PANEL, weight, FLOAT32)
            _multiply_block(x, x_stride, end - row, wide, width, start, start_stride, target, target_stride, FLOAT32)
        else:
            _multiply_block(x, x_stride, end - row, part, width, start, start_stride, target, target_stride, weight)
        start, start_stride = sums, SUMS_STRIDE
        word += width
    if p[BEST] != 0:
        if output_bytes != FLOAT32_BYTES:  # rounded in place
            for sums_at in range(sums, sums + (end - row) * SUMS_STRIDE, SUMS_STRIDE):
                convert_row(sums_at, sums_at, PANEL, FLOAT32, output)
        of_rows = leaders + row * 2 * PANEL * output_bytes
        keep_best(sums, SUMS_STRIDE, end - row, of_rows, index, output)
    elif output_bytes != FLOAT32_BYTES:
        for number in range(end - row):
            convert_row(sums + number * SUMS_STRIDE, y + number * y_stride, PANEL, FLOAT32, output)


@njit(**BODY_OPTIONS)
def _multiply_block(x, x_stride, num_rows, panel, width, start, start_stride, y, y_stride, weight):
    """Multiply all rows with a block of words, in tiles of about equal height."""
    row = 0
    for num_left in range((num_rows + MAX_ROWS - 1) // MAX_ROWS, 0, -1):
        height = (num_rows - row + num_left - 1) // num_left
        from_row, at_start, to_row = x + row * x_stride, start + row * start_stride, y + row * y_stride
        multiply_tile(height, from_row, x_stride, panel, width, at_start, start_stride, to_row, y_stride, weight)
        row += height


@njit(**BODY_OPTIONS)
def _run(p, leaders, lowest, weight, weight_bytes, output, output_bytes):
    """Take panels from the shared counter: all panels for the first chunk of rows, then all for the next."""
    forget_best(leaders, lowest)
    num_panels = p[OUT_SIZE] // PANEL
    most_rows = max(CHUNK_BYTES // (WORD_BYTES * p[NUM_WORDS]), MAX_ROWS)
    num_chunks = max((p[NUM_ROWS] + most_rows - 1) // most_rows, 1)
    num_rows = (p[NUM_ROWS] + num_chunks - 1) // num_chunks
    sums, wide = np.empty(num_rows * PANEL, np.float32), np.empty(BLOCK_WORDS * PANEL, np.float32)
    item = take_next(p[COUNTER])
    while item < num_panels * num_chunks:
        row = item // num_panels * num_rows
        end = min(row + num_rows, p[NUM_ROWS])
        sums_at, wide_at, best_at = address_of(sums), address_of(wide), address_of(leaders)
        _multiply(p, item % num_panels, row, end, sums_at, wide_at, best_at, weight, weight_bytes, output, output_bytes)
        item = take_next(p[COUNTER])
    if p[BEST] != 0 and publish_best(leaders, p[BEST], p[NUM_ROWS]) == -(lowest + 1):
        p[HAS_NAN] = 1


@cache
def compiled_product(weight_dtype, output_dtype):
    """The address of ``void product(int64 *parameters)`` for a weight and an output of these dtypes.

    The input is bfloat16 for ``bfloat16 pairs``, else float32; its rows are ``INPUT_STRIDE`` apart. The bias is
    float32. ``OUT_SIZE`` is a multiple of ``PANEL``, ``NUM_WORDS`` of ``UNROLLED``.
    """
    weight, output = STORAGE[weight_dtype](0), STORAGE[output_dtype](0)
    weight_bytes, output_bytes = weight.itemsize, output.itemsize
    rank_type = np.int32 if output_bytes == FLOAT32_BYTES else np.int16
    lowest = rank_type(np.iinfo(rank_type).min)

    def product(address):
        p = carray(address, (NUM_PARAMETERS,), dtype=np.int64)
        leaders = np.empty(2 * PANEL * p[NUM_ROWS] if p[BEST] != 0 else 0, rank_type)
        _run(p, leaders, lowest, weight, weight_bytes, output, output_bytes)

    return compile_kernel(product)
