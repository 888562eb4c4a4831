"""The threads that torch computes with, for compiled functions of ours.

torch brings an OpenMP runtime and keeps its threads spinning between operators. A second pool beside it would fight for
the same cores, so kernels of ours enter the same team, through the entry that compilers use for a parallel region.
"""

from __future__ import annotations

import ctypes
from functools import cache

ThreadFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def parallel_region() -> ctypes._NamedFuncPointer | None:
    """``GOMP_parallel(function, argument, num_threads, flags)`` of the runtime that torch loaded, if it has one.

    It calls ``function(argument)`` once on each of so many threads and waits; the GIL is free meanwhile.
    """
    enter: ctypes._NamedFuncPointer | None = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if enter is not None:
        enter.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        enter.restype = None
    return enter
