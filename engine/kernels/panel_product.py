"""Products with a weight that lies in panels, for CPUs with fused multiply-add, compiled.

A panel holds ``PANEL`` rows of the weight side by side, [in_size, PANEL]: one pass over it makes as many columns of the
output for up to ``MAX_ROWS`` rows of the input. Each sum runs over the input in order, whatever the number of rows:
what comes out for a row does not depend on what else is in the batch.
"""

from functools import cache

import numpy as np
from numba import carray, njit

from engine.kernels.compiled import PART_OPTIONS, STORAGE, compile_kernel
from engine.kernels.machine_code import take_next
from engine.kernels.tile_product import MAX_ROWS, PANEL, any_tile

CHUNK_ROWS = 96
"""Rows of the input that all panels see before the next ones: they stay in a core's own cache."""

FLOAT32_BYTES = 4

# The fields of the parameter block, all int64.
COUNTER, INPUT, PANELS, BIAS, OUTPUT = range(5)  # addresses
NUM_ROWS, IN_SIZE, OUT_SIZE = 5, 6, 7
NUM_PARAMETERS = 8

# With few rows a panel is seen once and comes from memory; with many it is in a cache after the first ones.
_tile = any_tile(max_prefetched=4)


@njit(**PART_OPTIONS)
def _multiply(p, index, row, end, weight, weight_bytes, output, output_bytes):
    """Rows ``row`` to ``end`` of the input times one panel, in tiles of about the same height."""
    x_stride, y_stride = FLOAT32_BYTES * p[IN_SIZE], output_bytes * p[OUT_SIZE]
    panel = p[PANELS] + index * p[IN_SIZE] * PANEL * weight_bytes
    bias = p[BIAS] + index * PANEL * FLOAT32_BYTES
    columns = p[OUTPUT] + index * PANEL * output_bytes
    for num_left in range((end - row + MAX_ROWS - 1) // MAX_ROWS, 0, -1):
        height = (end - row + num_left - 1) // num_left
        x, y = p[INPUT] + row * x_stride, columns + row * y_stride
        _tile(height, x, x_stride, panel, p[IN_SIZE], bias, y, y_stride, weight, output)
        row += height


@njit(**PART_OPTIONS)
def _run(p, weight, weight_bytes, output, output_bytes):
    """Take panels from the shared counter, all of them for the first rows of the input, then for the next."""
    num_panels = p[OUT_SIZE] // PANEL
    num_items = num_panels * ((p[NUM_ROWS] + CHUNK_ROWS - 1) // CHUNK_ROWS)
    item = take_next(p[COUNTER])
    while item < num_items:
        row = item // num_panels * CHUNK_ROWS
        end = min(row + CHUNK_ROWS, p[NUM_ROWS])
        _multiply(p, item % num_panels, row, end, weight, weight_bytes, output, output_bytes)
        item = take_next(p[COUNTER])


@cache
def compiled_product(weight_dtype, output_dtype):
    """The address of ``void product(int64 *parameters)`` for a weight and an output of these dtypes.

    The input and the bias are float32. ``OUT_SIZE`` is a multiple of ``PANEL``, ``IN_SIZE`` of ``UNROLLED``.
    """
    weight, output = STORAGE[weight_dtype](0), STORAGE[output_dtype](0)
    weight_bytes, output_bytes = weight.itemsize, output.itemsize

    def product(address):
        p = carray(address, (NUM_PARAMETERS,), dtype=np.int64)
        _run(p, weight, weight_bytes, output, output_bytes)

    return compile_kernel(product)
