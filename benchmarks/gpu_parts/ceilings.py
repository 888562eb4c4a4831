"""The best that a device can do, measured in the same run: reading its memory, and multiplying matrices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

NUM_REPEATS = 10


def wait(device: torch.device) -> None:
    """Wait until the device has done all launched work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(work: Callable[[], object], device: torch.device) -> float:
    """Median seconds of work that takes longer than its launch."""
    for _ in range(3):
        work()
    durations = []
    for _ in range(NUM_REPEATS):
        wait(device)
        started = time.perf_counter()
        work()
        wait(device)
        durations.append(time.perf_counter() - started)
    return statistics.median(durations)


def memory_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """The higher rate of reading (a sum) and copying, which reads and writes."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    read_s, copy_s = median_s(source.sum, device), median_s(lambda: target.copy_(source), device)
    return max(num_bytes / read_s, 2 * num_bytes / copy_s)


def matmul_flops_per_s(device: torch.device, size: int) -> float:
    """The rate of a square product in bfloat16, of random numbers: zeros would draw less power and run faster."""
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    output = torch.empty_like(left)
    return 2 * size**3 / median_s(lambda: torch.mm(left, right, out=output), device)
