"""The best that this machine can do: matrix products and reading memory, measured in the same run as the engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

NUM_REPEATS = 7


def median_s(function: Callable[[], object], num_repeats: int = NUM_REPEATS) -> float:
    """Median seconds of a call, after a first call that does not count."""
    function()
    durations = []
    for _ in range(num_repeats):
        started = time.perf_counter()
        function()
        durations.append(time.perf_counter() - started)
    return statistics.median(durations)


def matmul_gflops(dtype: torch.dtype, size: int = 2048) -> float:
    """Rate of a square matrix product through torch, in GFLOP/s."""
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2 * size**3 / median_s(lambda: left @ right) / 1e9


def memory_read_gb_per_s(num_bytes: int = 1 << 30) -> float:
    """The rate at which all threads together read memory that is not in a cache, in GB/s."""
    data = torch.ones(num_bytes // 4)
    return num_bytes / median_s(data.sum) / 1e9
