"""A step's memory stays with the process: the next one does not ask the system for it again."""

from __future__ import annotations

import subprocess
import sys

import pytest

STEPS = """
import resource, sys, threading
import torch
from engine.device.allocation import keep_freed_memory

if sys.argv[1] == "keep" and not keep_freed_memory():
    raise SystemExit("no such allocator")

def step():
    for _ in range(4):
        projections = torch.empty(1024 * 1280, dtype=torch.bfloat16).fill_(1.0)
        attended = torch.empty(1024 * 768, dtype=torch.bfloat16).fill_(1.0)
        del projections
        gate_up = torch.empty(1024 * 4096, dtype=torch.bfloat16).fill_(1.0)
        kept.append(bytearray(1000))
        gated = torch.empty(1024 * 2048, dtype=torch.bfloat16).fill_(1.0)
        del gate_up, attended

kept = []

def steps():
    for _ in range(40):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=steps)
thread.start()
thread.join()
"""


def _num_faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", STEPS, mode], capture_output=True, text=True, check=False)
    if "no such allocator" in done.stderr:
        pytest.fail("the C library has no mallopt: this test, and what it tests, are for glibc")
    return int(done.stdout)


def test_steps_find_the_pages_of_those_before_them() -> None:
    """Left alone, each of them faults in thousands of pages that the one before gave back."""
    kept, left = _num_faults("keep"), _num_faults("leave")
    assert left > 20 * 1000
    assert kept < left / 20
