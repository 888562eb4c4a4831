"""What a worker tells the OpenMP runtime before torch loads it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from engine.device.openmp import SPIN_COUNT

CODE = """
import threading
from engine.device.openmp import prepare_openmp
prepare_openmp(2)
import torch
seen = []
thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
thread.start(); thread.join()
print(*seen)
"""


def run(code: str, **variables: str) -> tuple[str, str]:
    """What a new process prints, and what its OpenMP runtime says of its settings."""
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


def test_nothing_is_set_once_torch_is_there() -> None:
    told, settings = run("import os, torch\nfrom engine.device.openmp import prepare_openmp\nprepare_openmp(3)\n"
                         "print(os.environ['OMP_NUM_THREADS'], os.environ.get('GOMP_SPINCOUNT'))")  # fmt: skip

    assert told == "1 None"
    assert f"GOMP_SPINCOUNT = '{SPIN_COUNT}'" not in settings
