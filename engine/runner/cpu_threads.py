"""The threads that a CPU computes with: whether it has as many as it was told to, and on which cores they run."""

from __future__ import annotations

import logging
import os
import threading
import time

import torch

from engine.device.cores import stay_on, step_back, usable_cores
from engine.kernels.thread_team import run_on_team
from engine.layers.packed_weight import pack

logger = logging.getLogger(f"baton.{__name__}")

SIZE = 1024
NUM_TOKENS = 128
"""One product of these takes a thread some milliseconds: long beside waking another thread, short beside a start."""

NUM_TRIES = 5

NICENESS = 10
"""How far threads that compute stand back. They take all the time that there is; whoever reads a request or sends a
token needs a moment of it, and is waited for by a client (`benchmarks/serving_peer.py`)."""

PLACED_BY_OTHERS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
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
            "the cores, or fewer are usable here (num_threads sets how many an engine uses)",
            num_threads,
            speedup,
        )
    return speedup


def settle_threads() -> list[int]:
    """Let others go before this thread and its team, and keep each of them on a core of its own where they take all.

    Threads of a team wait for each other at the end of every product. Whenever another process wants a core for a
    moment, the system may move one of them to the core of another one, and that product takes twice as long. A team
    smaller than the machine stays where the system puts it: where that is best, nobody else knows.

    Threads that this one starts afterwards stand back too, and stay on its core, unless they call ``run_anywhere``.

    Returns:
        The cores, one a thread; empty where threads are free to move.
    """
    num_threads, cores = torch.get_num_threads(), usable_cores()
    is_whole_machine = 1 < num_threads == len(cores)
    pins = is_whole_machine and not any(name in os.environ for name in PLACED_BY_OTHERS)
    free, lock = list(cores), threading.Lock()

    def settle() -> None:
        step_back(NICENESS)
        if pins:
            with lock:
                stay_on(free.pop(0))

    if num_threads > 1 and run_on_team(settle, num_threads):
        return cores if pins else []
    step_back(NICENESS)
    return []
