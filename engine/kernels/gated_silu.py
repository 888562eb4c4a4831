"""The gates of MLPs in one pass, compiled: silu(gate) * up, and the one that is bounded."""

from functools import cache

import numpy as np
from numba import carray, njit

from engine.kernels.compiled import PART_OPTIONS, STORAGE, compile_kernel, exp
from engine.kernels.lanes import LANES
from engine.kernels.machine_code import float_from_bits, narrow, pointer, take_next, widen
from engine.kernels.row_loops import clamped_gate_row, gate_row

PART = 1024
"""Columns that one thread takes at a time."""

# The fields of the parameter block, all int64.
COUNTER, GATE_UP, OUTPUT = range(3)  # addresses
NUM_ROWS, SIZE = 3, 4
NUM_PARAMETERS = 5
ALPHA, LIMIT = 5, 6  # bits of float32
NUM_CLAMPED_PARAMETERS = 7


@njit(**PART_OPTIONS)
def _gate(gate, up, output):
    whole = len(gate) // LANES * LANES
    if whole > 0:
        gate_row(gate.ctypes.data, up.ctypes.data, output.ctypes.data, whole, gate[0])
    for i in range(whole, len(gate)):
        g = widen(gate[i])
        small = exp(-abs(g))  # never above one, whatever the sign of the gate
        share = (np.float32(1.0) if g >= np.float32(0.0) else small) / (np.float32(1.0) + small)
        output[i] = narrow(g * share * widen(up[i]), output[i])


@njit(**PART_OPTIONS)
def _clamped_gate(gate, up, output, alpha, limit):
    whole = len(gate) // LANES * LANES
    if whole > 0:
        clamped_gate_row(gate.ctypes.data, up.ctypes.data, output.ctypes.data, whole, alpha, limit, gate[0])
    for i in range(whole, len(gate)):
        g, u = widen(gate[i]), widen(up[i])
        g, u = limit if g > limit else g, limit if u > limit else -limit if u < -limit else u
        small = exp(-abs(g * alpha))
        share = (np.float32(1.0) if g >= np.float32(0.0) else small) / (np.float32(1.0) + small)
        output[i] = narrow(g * share * (u + np.float32(1.0)), output[i])


@njit(**PART_OPTIONS)
def _run_clamped(p, gate_up, output, alpha, limit):
    """As ``_run``."""
    size = p[SIZE]
    parts = (size + PART - 1) // PART
    item = take_next(p[COUNTER])
    while item < p[NUM_ROWS] * parts:
        row, start = item // parts, item % parts * PART
        end = min(start + PART, size)
        up = gate_up[row, size + start : size + end]
        _clamped_gate(gate_up[row, start:end], up, output[row, start:end], alpha, limit)
        item = take_next(p[COUNTER])


@njit(**PART_OPTIONS)
def _run(p, gate_up, output):
    """Take parts of rows from the shared counter. gate_up: [num_rows, 2 * size]; output: [num_rows, size]."""
    size = p[SIZE]
    parts = (size + PART - 1) // PART
    item = take_next(p[COUNTER])
    while item < p[NUM_ROWS] * parts:
        row, start = item // parts, item % parts * PART
        end = min(start + PART, size)
        _gate(gate_up[row, start:end], gate_up[row, size + start : size + end], output[row, start:end])
        item = take_next(p[COUNTER])


@cache
def compiled_gate(dtype):
    """The address of ``void gate(int64 *parameters)`` for tensors of a dtype."""
    storage = STORAGE[dtype]

    def gate(address):
        p = carray(address, (NUM_PARAMETERS,), dtype=np.int64)
        gate_up = carray(pointer(p[GATE_UP]), (p[NUM_ROWS], 2 * p[SIZE]), dtype=storage)
        _run(p, gate_up, carray(pointer(p[OUTPUT]), (p[NUM_ROWS], p[SIZE]), dtype=storage))

    return compile_kernel(gate)


@cache
def compiled_clamped_gate(dtype):
    """The address of ``void gate(int64 *parameters)`` for tensors of a dtype; see ``GateClamp``."""
    storage = STORAGE[dtype]

    def clamped_gate(address):
        p = carray(address, (NUM_CLAMPED_PARAMETERS,), dtype=np.int64)
        gate_up = carray(pointer(p[GATE_UP]), (p[NUM_ROWS], 2 * p[SIZE]), dtype=storage)
        output = carray(pointer(p[OUTPUT]), (p[NUM_ROWS], p[SIZE]), dtype=storage)
        alpha, limit = float_from_bits(np.int32(p[ALPHA])), float_from_bits(np.int32(p[LIMIT]))
        _run_clamped(p, gate_up, output, alpha, limit)

    return compile_kernel(clamped_gate)
