"""Runs a compiled function on the threads that torch computes with.

torch brings an OpenMP runtime and keeps its threads spinning between operators. A second pool beside it would fight for
the same cores, so kernels of ours enter the same team, through the entry that compilers use for a parallel region.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

ThreadFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _parallel_region() -> ctypes._NamedFuncPointer | None:
    """``GOMP_parallel(function, argument, num_threads, flags)`` of the runtime that torch loaded, if it has one."""
    enter: ctypes._NamedFuncPointer | None = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if enter is not None:
        enter.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        enter.restype = None
    return enter


def run_on_team(function_address: int, argument_address: int, *, max_threads: int) -> None:
    """Call ``function(argument)`` once on each of up to ``max_threads`` threads and wait; the GIL is free meanwhile.

    The function shares the work out among its callers. Without a runtime to ask, the calling thread does it all.
    """
    num_threads = min(torch.get_num_threads(), max_threads)
    enter = _parallel_region()
    if num_threads == 1 or enter is None:
        ThreadFunction(function_address)(argument_address)
    else:
        enter(function_address, argument_address, num_threads, 0)
