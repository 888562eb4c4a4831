"""The CPU threads that an engine computes with: the speed-up that they give, and the cores they run on."""

from __future__ import annotations

import logging
import os
import threading
import time

import torch

from engine.device.cores import stay_on, step_back, usable_cores
from engine.kernels.thread_team import run_on_team
from engine.layers.packed_weight import Multiply, pack

logger = logging.getLogger(f"baton.{__name__}")

SIZE = 1024
NUM_TOKENS = 128
MIN_S = 2e-3
"""Products of this size are repeated until they take one thread so long: long compared with waking another thread,
short compared with the start of an engine. With AMX one product takes a tenth of it.
"""

NUM_TRIES = 5

NICENESS = 10
"""The niceness of compute threads. They use all the CPU time they can get. The threads that read requests and send
tokens need only moments of it, but clients wait for those (`benchmarks/serving_peer.py`)."""

PLACED_BY_OTHERS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
"""Environment variables that already tell the OpenMP runtime which cores its threads run on."""


def measure_speedup(dtype: torch.dtype) -> float:
    """How many times as fast a product runs with all of torch's threads as with one; 1.0 if there is only one.

    Takes the best of several tries of each, alternating, so that a moment in which other processes use the cores counts
    little. The product is that of linear layers: same library, same team of threads.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        return 1.0
    multiply = pack(torch.zeros(SIZE, SIZE, dtype=dtype), None)
    x = torch.zeros(NUM_TOKENS, SIZE, dtype=dtype)
    best_s = {1: float("inf"), num_threads: float("inf")}
    num_products = 1
    try:
        for _ in range(NUM_TRIES):
            for count in best_s:
                torch.set_num_threads(count)
                duration_s = _duration_s(multiply, x, num_products)
                while count == 1 and duration_s < MIN_S:
                    num_products *= 2
                    duration_s = _duration_s(multiply, x, num_products)
                best_s[count] = min(best_s[count], duration_s / num_products)
    finally:
        torch.set_num_threads(num_threads)
    return best_s[1] / best_s[num_threads]


def _duration_s(multiply: Multiply, x: torch.Tensor, num_products: int) -> float:
    """Seconds of so many products, after one that does not count."""
    multiply(x)
    start_s = time.perf_counter()
    for _ in range(num_products):
        multiply(x)
    return time.perf_counter() - start_s


def check_threads(dtype: torch.dtype) -> float:
    """Measure the speed-up, and log a warning if the machine gives fewer threads than it was asked for.

    Returns:
        How many times as fast a product runs as with one thread.
    """
    num_threads, speedup = torch.get_num_threads(), measure_speedup(dtype)
    if speedup < (1 + num_threads) / 2:
        logger.warning(
            "with %d threads a matrix product is only %.1f times as fast as with one: other processes use the cores, "
            "or fewer are usable here (num_threads sets the number of threads)",
            num_threads,
            speedup,
        )
    return speedup


def settle_threads() -> list[int]:
    """Lower the priority of this thread and its team, and pin each thread to a core if the team uses the whole machine.

    The threads of a team wait for each other at the end of every product. When another process wants a core for a
    moment, the system may move one thread to a core that another thread of the team runs on, and that product takes
    twice as long. A team smaller than the machine is not pinned: only the system knows which cores are best.

    Threads that this one starts later inherit the low priority and the core, unless they call ``run_anywhere``.

    Returns:
        The cores, one a thread; empty if threads are free to move.
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
