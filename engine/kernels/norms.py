"""The residual sum and its norm in one compiled pass."""

from functools import cache

import numpy as np
from numba import carray, njit

from engine.kernels.compiled import BODY_OPTIONS, PART_OPTIONS, STORAGE, compile_kernel
from engine.kernels.lanes import LANES
from engine.kernels.machine_code import address_of, narrow, pointer, take_next, widen
from engine.kernels.row_loops import add_row, scale_row, scale_row_by_sum, square_sum

# The fields of the parameter block, all int64.
COUNTER, HIDDEN, DELTA, WEIGHT, OUTPUT, NUMBERS = range(6)  # addresses; DELTA 0 for none, OUTPUT 0 for only the sum
NUM_ROWS, SIZE, HIDDEN_STRIDE, OUTPUT_STRIDE = 6, 7, 8, 9  # strides of rows, in elements
BIAS = 10  # address, for layer norms
NUM_PARAMETERS = 11

EPSILON, OFFSET, DELTA_SCALE = range(3)
NUM_NORM_NUMBERS = 3
"""A norm's float32 numbers: epsilon, the offset added to its weights, and the factor of the delta."""


@njit(**PART_OPTIONS)
def _add(hidden, delta, scale):
    whole = len(hidden) // LANES * LANES
    if whole > 0:
        add_row(address_of(hidden), address_of(delta), whole, scale, hidden[0])
    for i in range(whole, len(hidden)):
        hidden[i] = narrow(widen(hidden[i]) + scale * widen(delta[i]), hidden[i])


@njit(**PART_OPTIONS)
def normalize(source, weight, numbers, size, target):
    """target = source * (weight + offset) / root mean square of source.

    ``target`` may be ``source``, or float32 where the others are not. ``size``, their length, is an argument of its own
    so that the compiler knows that it is the same for all rows.
    """
    epsilon, offset = numbers[EPSILON], numbers[OFFSET]
    whole, total = size // LANES * LANES, np.float32(0.0)
    if whole > 0:
        total = square_sum(address_of(source), whole, source[0])
    for i in range(whole, size):
        total += widen(source[i]) * widen(source[i])
    scale = np.float32(1.0) / np.sqrt(total / np.float32(size) + epsilon)
    if whole > 0:
        addresses = address_of(source), address_of(weight), address_of(target)
        if offset == np.float32(0.0):
            scale_row(addresses[0], addresses[1], source[0], addresses[2], target[0], whole, scale, offset)
        else:
            scale_row_by_sum(addresses[0], addresses[1], source[0], addresses[2], target[0], whole, scale, offset)
    for i in range(whole, size):
        target[i] = narrow(widen(source[i]) * scale * (widen(weight[i]) + offset), target[i])


@njit(**PART_OPTIONS)
def _center_and_normalize(source, weight, bias, epsilon, size, target):
    """target = (source - mean) / standard deviation * weight + bias."""
    total, squares = np.float32(0.0), np.float32(0.0)
    for i in range(size):
        total += widen(source[i])
    mean = total / np.float32(size)
    for i in range(size):
        squares += (widen(source[i]) - mean) * (widen(source[i]) - mean)
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(size) + epsilon)
    for i in range(size):
        target[i] = narrow((widen(source[i]) - mean) * scale * widen(weight[i]) + widen(bias[i]), target[i])


@njit(**BODY_OPTIONS)
def _run(p, hidden, delta, weight, output):
    """Take rows from the shared counter until none is left. hidden and output are [num_rows, own stride], of which the
    first ``size`` numbers count; delta: [num_rows, size].
    """
    size = p[SIZE]
    numbers = carray(pointer(p[NUMBERS]), (NUM_NORM_NUMBERS,), dtype=np.float32)
    row = take_next(p[COUNTER])
    while row < p[NUM_ROWS]:
        if p[DELTA] != 0:
            _add(hidden[row, :size], delta[row], numbers[DELTA_SCALE])
        if p[OUTPUT] != 0:
            normalize(hidden[row, :size], weight, numbers, size, output[row, :size])
        row = take_next(p[COUNTER])


@njit(**BODY_OPTIONS)
def _run_layer_norm(p, hidden, delta, weight, bias, output):
    """The same for a layer norm; weight and bias: [size]."""
    size = p[SIZE]
    numbers = carray(pointer(p[NUMBERS]), (NUM_NORM_NUMBERS,), dtype=np.float32)
    row = take_next(p[COUNTER])
    while row < p[NUM_ROWS]:
        if p[DELTA] != 0:
            _add(hidden[row, :size], delta[row], numbers[DELTA_SCALE])
        _center_and_normalize(hidden[row, :size], weight, bias, numbers[EPSILON], size, output[row, :size])
        row = take_next(p[COUNTER])


@cache
def compiled_layer_norm(dtype):
    """The address of ``void norm(int64 *parameters)``: a layer norm of tensors of a dtype."""
    storage = STORAGE[dtype]

    def layer_norm(address):
        p = carray(address, (NUM_PARAMETERS,), dtype=np.int64)
        num_rows, size = p[NUM_ROWS], p[SIZE]
        hidden = carray(pointer(p[HIDDEN]), (num_rows, p[HIDDEN_STRIDE]), dtype=storage)
        delta = carray(pointer(p[DELTA]), (num_rows, size), dtype=storage)
        weight = carray(pointer(p[WEIGHT]), (size,), dtype=storage)
        bias = carray(pointer(p[BIAS]), (size,), dtype=storage)
        output = carray(pointer(p[OUTPUT]), (num_rows, p[OUTPUT_STRIDE]), dtype=storage)
        _run_layer_norm(p, hidden, delta, weight, bias, output)

    return compile_kernel(layer_norm)


@cache
def compiled_norm(dtype):
    """The address of ``void norm(int64 *parameters)``: an RMS norm of tensors of a dtype, or none."""
    storage = STORAGE[dtype]

    def norm(address):
        p = carray(address, (NUM_PARAMETERS,), dtype=np.int64)
        num_rows, size = p[NUM_ROWS], p[SIZE]
        hidden = carray(pointer(p[HIDDEN]), (num_rows, p[HIDDEN_STRIDE]), dtype=storage)
        delta = carray(pointer(p[DELTA]), (num_rows, size), dtype=storage)
        weight = carray(pointer(p[WEIGHT]), (size,), dtype=storage)
        output = carray(pointer(p[OUTPUT]), (num_rows, p[OUTPUT_STRIDE]), dtype=storage)
        _run(p, hidden, delta, weight, output)

    return compile_kernel(norm)
