"""The residual sum and its root-mean-square normalisation in one pass, compiled."""

from functools import cache

import numpy as np
from numba import carray, njit

from engine.kernels.compiled import PART_OPTIONS, STORAGE, compile_kernel
from engine.kernels.lanes import LANES
from engine.kernels.machine_code import narrow, pointer, take_next, widen
from engine.kernels.row_loops import add_row, scale_row, square_sum

# The fields of the parameter block, all int64.
COUNTER, HIDDEN, DELTA, WEIGHT, OUTPUT, EPSILON = range(6)  # addresses; EPSILON of a float32, DELTA 0 for none
NUM_ROWS, SIZE = 6, 7
NUM_PARAMETERS = 8


@njit(**PART_OPTIONS)
def _add(hidden, delta):
    whole = len(hidden) // LANES * LANES
    if whole > 0:
        add_row(hidden.ctypes.data, delta.ctypes.data, whole, hidden[0])
    for i in range(whole, len(hidden)):
        hidden[i] = narrow(widen(hidden[i]) + widen(delta[i]), hidden[i])


@njit(**PART_OPTIONS)
def normalize(source, weight, epsilon, target):
    """target = source * weight over its root mean square; ``target`` may be float32 where the others are not."""
    size = len(source)
    whole, total = size // LANES * LANES, np.float32(0.0)
    if whole > 0:
        total = square_sum(source.ctypes.data, whole, source[0])
    for i in range(whole, size):
        total += widen(source[i]) * widen(source[i])
    scale = np.float32(1.0) / np.sqrt(total / np.float32(size) + epsilon)
    if whole > 0:
        scale_row(source.ctypes.data, weight.ctypes.data, source[0], target.ctypes.data, target[0], whole, scale)
    for i in range(whole, size):
        target[i] = narrow(widen(source[i]) * scale * widen(weight[i]), target[i])


@njit(**PART_OPTIONS)
def _run(p, hidden, delta, weight, output):
    """Take rows from the shared counter until none is left. hidden, delta, output: [num_rows, size]."""
    epsilon = carray(pointer(p[EPSILON]), (1,), dtype=np.float32)[0]
    row = take_next(p[COUNTER])
    while row < p[NUM_ROWS]:
        if p[DELTA] != 0:
            _add(hidden[row], delta[row])
        normalize(hidden[row], weight, epsilon, output[row])
        row = take_next(p[COUNTER])


@cache
def compiled_norm(dtype):
    """The address of ``void norm(int64 *parameters)`` for tensors of a dtype."""
    storage = STORAGE[dtype]

    def norm(address):
        p = carray(address, (NUM_PARAMETERS,), dtype=np.int64)
        shape = (p[NUM_ROWS], p[SIZE])
        hidden = carray(pointer(p[HIDDEN]), shape, dtype=storage)
        delta = carray(pointer(p[DELTA]), shape, dtype=storage)
        weight = carray(pointer(p[WEIGHT]), (p[SIZE],), dtype=storage)
        output = carray(pointer(p[OUTPUT]), shape, dtype=storage)
        _run(p, hidden, delta, weight, output)

    return compile_kernel(norm)
