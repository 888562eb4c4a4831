"""Kernels one after another in one parallel region: its threads meet after each."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from engine.kernels.compiled import compile_kernel
from engine.kernels.machine_code import pointer

# The fields of the parameter block, all int64.
CALLS, BARRIER, THREAD_NUMBER = range(3)  # addresses; those of functions are only used with several threads
NUM_CALLS, NUM_THREADS = 3, 4
NUM_PARAMETERS = 5

KERNEL, KERNEL_PARAMETERS, MAX_THREADS = range(3)
NUM_CALL_FIELDS = 3
"""A call: two addresses, and how many threads take part; the others wait."""

_ADDRESS = ir.IntType(8).as_pointer()


@intrinsic
def call_kernel(typing_context: Any, function: Any, parameters: Any) -> Any:
    """Call ``void function(void *)`` at an address with another one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_ADDRESS]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], kind), [builder.inttoptr(arguments[1], _ADDRESS)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def meet(typing_context: Any, barrier: Any) -> Any:
    """Call ``void barrier(void)`` at an address: wait for the other threads of the region."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.call(builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), []).as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def number_of(typing_context: Any, function: Any) -> Any:
    """Call ``int function(void)`` at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), []).as_pointer()
        return builder.sext(builder.call(builder.inttoptr(arguments[0], kind), []), ir.IntType(64))

    return types.int64(types.int64), generate


@cache
def compiled_call_loop():
    """The address of ``void run_calls(int64 *parameters)``, which every thread of a region calls."""

    def run_calls(address):
        p = carray(address, (NUM_PARAMETERS,), dtype=np.int64)
        calls = carray(pointer(p[CALLS]), (p[NUM_CALLS], NUM_CALL_FIELDS), dtype=np.int64)
        is_team = p[NUM_THREADS] > 1
        thread = number_of(p[THREAD_NUMBER]) if is_team else 0
        for index in range(p[NUM_CALLS]):
            if is_team and index > 0:
                meet(p[BARRIER])
            if thread < calls[index, MAX_THREADS]:
                call_kernel(calls[index, KERNEL], calls[index, KERNEL_PARAMETERS])

    return compile_kernel(run_calls)
