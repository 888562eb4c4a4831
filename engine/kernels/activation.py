"""An MLP's activation in one compiled pass: of gate and up projections, or of one projection without a gate."""

from functools import cache

import numpy as np
from numba import carray, njit

from engine.kernels.compiled import BODY_OPTIONS, PART_OPTIONS, STORAGE, compile_kernel, exp
from engine.kernels.lanes import LANES
from engine.kernels.machine_code import address_of, narrow, pointer, take_next, widen
from engine.kernels.row_loops import (
    ERROR_POLYNOMIAL,
    ERROR_SLOPE,
    GELU_CUBE,
    GELU_LINE,
    clamped_gate_row,
    gelu_gate_row,
    gelu_row,
    gelu_tanh_gate_row,
    gelu_tanh_row,
    silu_gate_row,
)

PART = 1024
"""Columns that one thread takes at a time."""

# The fields of the parameter block, all int64.
COUNTER, INPUT, OUTPUT, NUMBERS = range(4)  # addresses
NUM_ROWS, SIZE, KIND, OUTPUT_STRIDE = 4, 5, 6, 7  # the stride counts elements
NUM_PARAMETERS = 8

ALPHA, LIMIT = range(2)
NUM_CLAMP_NUMBERS = 2
"""float32 numbers at NUMBERS, which only CLAMPED_GATE reads: alpha and limit."""

SILU_GATE, GELU_TANH_GATE, GELU_TANH, CLAMPED_GATE, GELU_GATE, GELU = range(6)
"""Kinds: silu(gate) * up, gelu(gate) * up, gelu, and ``GateClamp``'s formula; for both GELUs see ``Activation``."""


_ERROR_POLYNOMIAL = np.array(ERROR_POLYNOMIAL, dtype=np.float32)


@njit(**PART_OPTIONS)
def _gelu_share(g):
    """gelu(g) / g for one number, as in ``row_loops``."""
    half_z = abs(g) * np.float32(ERROR_SLOPE)
    t = np.float32(1.0) / (half_z + np.float32(1.0))
    p = np.float32(0.0)
    for coefficient in _ERROR_POLYNOMIAL:
        p = p * t + coefficient
    below = t * np.float32(0.5) * exp(np.float32(-4.0) * half_z * half_z + p)
    return np.float32(1.0) - below if g >= np.float32(0.0) else below


@njit(**PART_OPTIONS)
def _share(kind, g):
    """activation(g) / g for one number."""
    if kind in (GELU_GATE, GELU):
        return _gelu_share(g)
    bent = g if kind == SILU_GATE else g * (np.float32(GELU_CUBE) * (g * g) + np.float32(GELU_LINE))
    small = exp(-abs(bent))  # at most one, whatever the sign of the gate
    return (np.float32(1.0) if bent >= np.float32(0.0) else small) / (np.float32(1.0) + small)


@njit(**PART_OPTIONS)
def has_no_gate(kind):
    """True for a kind without a gate."""
    return kind in (GELU_TANH, GELU)


@njit(**PART_OPTIONS)
def bend_row(kind, gate, up, output, count, like):
    """Apply the activation to a row whose length is a multiple of ``LANES``. ``like`` is a number of the row's type;
    the other arguments are addresses and a count.
    """
    if kind == SILU_GATE:
        silu_gate_row(gate, up, output, count, like)
    elif kind == GELU_TANH_GATE:
        gelu_tanh_gate_row(gate, up, output, count, like)
    elif kind == GELU_GATE:
        gelu_gate_row(gate, up, output, count, like)
    elif kind == GELU_TANH:
        gelu_tanh_row(gate, up, output, count, like)
    else:
        gelu_row(gate, up, output, count, like)


@njit(**PART_OPTIONS)
def _bend(kind, gate, up, output):
    """Apply the activation to a row of any length. ``up`` is not read if the kind has no gate."""
    whole = len(gate) // LANES * LANES
    if whole > 0:
        bend_row(kind, address_of(gate), address_of(up), address_of(output), whole, gate[0])
    for i in range(whole, len(gate)):
        g = widen(gate[i])
        other = np.float32(1.0) if has_no_gate(kind) else widen(up[i])
        output[i] = narrow(g * _share(kind, g) * other, output[i])


@njit(**PART_OPTIONS)
def _clamp(gate, up, output, alpha, limit):
    """The activation of a clamped gate."""
    whole = len(gate) // LANES * LANES
    if whole > 0:
        clamped_gate_row(address_of(gate), address_of(up), address_of(output), whole, alpha, limit, gate[0])
    for i in range(whole, len(gate)):
        g, u = widen(gate[i]), widen(up[i])
        g, u = limit if g > limit else g, limit if u > limit else -limit if u < -limit else u
        small = exp(-abs(g * alpha))
        share = (np.float32(1.0) if g >= np.float32(0.0) else small) / (np.float32(1.0) + small)
        output[i] = narrow(g * share * (u + np.float32(1.0)), output[i])


@njit(**BODY_OPTIONS)
def _run(p, source, numbers, output):
    """Take parts of rows from the shared counter. source: [num_rows, 2 * size], the gate first, or [num_rows, size]
    without a gate; output: [num_rows, size] or wider.
    """
    size, kind = p[SIZE], p[KIND]
    behind = 0 if has_no_gate(kind) else size
    parts = (size + PART - 1) // PART
    item = take_next(p[COUNTER])
    while item < p[NUM_ROWS] * parts:
        row, start = item // parts, item % parts * PART
        end = min(start + PART, size)
        gate, up = source[row, start:end], source[row, behind + start : behind + end]
        if kind == CLAMPED_GATE:
            _clamp(gate, up, output[row, start:end], numbers[ALPHA], numbers[LIMIT])
        else:
            _bend(kind, gate, up, output[row, start:end])
        item = take_next(p[COUNTER])


@cache
def compiled_activation(dtype):
    """The address of ``void bend(int64 *parameters)`` for tensors of a dtype."""
    storage = STORAGE[dtype]

    def bend(address):
        p = carray(address, (NUM_PARAMETERS,), dtype=np.int64)
        width = p[SIZE] if has_no_gate(p[KIND]) else 2 * p[SIZE]
        source = carray(pointer(p[INPUT]), (p[NUM_ROWS], width), dtype=storage)
        numbers = carray(pointer(p[NUMBERS]), (NUM_CLAMP_NUMBERS,), dtype=np.float32)
        _run(p, source, numbers, carray(pointer(p[OUTPUT]), (p[NUM_ROWS], p[OUTPUT_STRIDE]), dtype=storage))

    return compile_kernel(bend)
