"""The environment that a worker sets for torch and its OpenMP runtime before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from engine.device.torch_environment import SPIN_COUNT

CODE = """
import threading
from engine.device.torch_environment import prepare_torch
prepare_torch(2)
import torch
seen = []
thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
thread.start(); thread.join()
print(*seen)
"""

TOO_LATE = """
import os, torch
from engine.device.torch_environment import prepare_torch
prepare_torch(3)
print(os.environ["OMP_NUM_THREADS"], os.environ.get("GOMP_SPINCOUNT"))
"""


def run(code: str, **variables: str) -> tuple[str, str]:
    """The output of a new process, and the settings that its OpenMP runtime reports."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_DISPLAY_ENV": "VERBOSE", **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


def test_every_thread_of_a_worker_has_the_team_that_was_asked_for_and_spins_for_a_moment_only() -> None:
    num_threads, settings = run(CODE)

    assert num_threads == "2"
    assert f"GOMP_SPINCOUNT = '{SPIN_COUNT}'" in settings


@pytest.mark.parametrize(
    ("name", "value", "told"), [("GOMP_SPINCOUNT", "77", "'77'"), ("OMP_WAIT_POLICY", "PASSIVE", "'0'")]
)
def test_what_the_operator_set_stands(name: str, value: str, told: str) -> None:
    _, settings = run(CODE, **{name: value})

    assert f"GOMP_SPINCOUNT = {told}" in settings


def test_threads_are_left_alone_once_torch_is_there() -> None:
    told, settings = run(TOO_LATE)

    assert told == "1 None"
    assert f"GOMP_SPINCOUNT = '{SPIN_COUNT}'" not in settings


PAGES = """
from engine.device.torch_environment import prepare_torch
prepare_torch(1)
import torch
tensor = torch.ones(32 << 20)
print(next(int(line.split()[1]) >> 10 for line in open("/proc/self/smaps_rollup") if "AnonHugePages" in line))
"""


def test_large_tensors_lie_in_huge_pages_unless_the_operator_said_otherwise() -> None:
    with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
        is_up_to_us = "[madvise]" in file.read()

    with_them, without_them = int(run(PAGES)[0]), int(run(PAGES, THP_MEM_ALLOC_ENABLE="0")[0])

    assert without_them == 0 or not is_up_to_us
    assert with_them > 64 or not is_up_to_us
