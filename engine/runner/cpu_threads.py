"""The threads that a CPU computes with: whether it has as many as it was told to, and on which cores they run."""

from __future__ import annotations

import logging
import os
import threading
import time

import torch

from engine.device.cores import stay_on, usable_cores
from engine.kernels.thread_team import run_on_team
from engine.layers.packed_weight import pack

logger = logging.getLogger(f"baton.{__name__}")

SIZE = 1024
NUM_TOKENS = 128
"""One product of these takes a thread some milliseconds: long beside waking another thread, short beside a start."""

NUM_TRIES = 5

_PLACED_BY_OTHERS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
"""Variables by which somebody told OpenMP's runtime on which cores its threads run."""


def measure_speedup(dtype: torch.dtype) -> float:
    """How many times as fast a matrix product is with all of torch's threads as with one; 1.0 where there is only one.

    The best of several tries of each, in turn, so that a moment in which others use the cores counts little. It is the
    product of linear layers, by the same library and the same team of threads.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        return 1.0
    multiply = pack(torch.zeros(SIZE, SIZE, dtype=dtype), None)
    x = torch.zeros(NUM_TOKENS, SIZE, dtype=dtype)
    best_s = {1: float("inf"), num_threads: float("inf")}
    try:
        for _ in range(NUM_TRIES):
            for count in best_s:
                torch.set_num_threads(count)
                multiply(x)
                start_s = time.perf_counter()
                multiply(x)
                best_s[count] = min(best_s[count], time.perf_counter() - start_s)
    finally:
        torch.set_num_threads(num_threads)
    return best_s[1] / best_s[num_threads]


def check_threads(dtype: torch.dtype) -> float:
    """Measure, and warn where the machine gives fewer threads than it was asked for.

    Returns:
        How many times as fast as with one thread a product is.
    """
    num_threads, speedup = torch.get_num_threads(), measure_speedup(dtype)
    if speedup < (1 + num_threads) / 2:
        logger.warning(
            "asked for %d threads, but a matrix product is only %.1f times as fast as with one: other processes use "
            "the cores, or fewer are usable here (num_threads in the configuration sets how many an engine uses)",
            num_threads,
            speedup,
        )
    return speedup


def pin_threads() -> list[int]:
    """Keep each thread of this one's team on a core of its own, if together they take all cores of this process.

    Threads of a team wait for each other at the end of every product. Whenever another process wants a core for a
    moment, the system may move one of them to the core of another one, and that product takes twice as long. A team
    smaller than the machine is left alone: where its threads run best, nobody but the system knows.

    Threads that this one starts afterwards stay on its core too, unless they call ``run_anywhere``.

    Returns:
        The cores, one a thread; empty where nothing was done.
    """
    cores = usable_cores()
    if len(cores) < 2 or torch.get_num_threads() != len(cores):
        return []
    if any(name in os.environ for name in _PLACED_BY_OTHERS):
        return []
    free, lock = list(cores), threading.Lock()

    def take_core() -> None:
        with lock:
            stay_on(free.pop(0))

    return cores if run_on_team(take_core, len(cores)) else []
