"""Runs compiled functions of ours on the threads that torch computes with.

torch brings an OpenMP runtime whose threads keep spinning between operators. A second thread pool would fight for the
same cores, so our kernels enter the same team, through the entry point that compilers use for a parallel region.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

ThreadFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def parallel_region() -> ctypes._NamedFuncPointer | None:
    """``GOMP_parallel(function, argument, num_threads, flags)`` of the runtime that torch loaded, if it has one.

    It calls ``function(argument)`` once on each of ``num_threads`` threads and waits, without the GIL.
    """
    enter: ctypes._NamedFuncPointer | None = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if enter is not None:
        enter.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        enter.restype = None
    return enter


@cache
def team_function(name: str) -> int:
    """The address of a function that threads within a parallel region call; 0 if torch's runtime has none."""
    function = getattr(ctypes.CDLL(None), name, None) if parallel_region() else None
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


def run_on_team(function: Callable[[], None], num_threads: int) -> bool:
    """Call ``function`` once on each thread of this thread's team; False if there is no team."""
    enter = parallel_region()
    if enter is None:
        return False
    entry = ThreadFunction(lambda _: function())
    enter(ctypes.cast(entry, ctypes.c_void_p), None, num_threads, 0)
    return True
