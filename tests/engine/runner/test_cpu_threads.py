"""The number of compute threads, and whether the machine has cores for them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.frontend.os_threads import os_thread_name
from engine.runner import cpu_threads

EXPECTED_NICENESS = max(cpu_threads.NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
"""That of compute threads, unless the tests themselves stand back further."""


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measuring_leaves_the_number_of_threads_as_it_was(dtype: torch.dtype) -> None:
    torch.set_num_threads(2)

    assert cpu_threads.measure_speedup(dtype) > 0
    assert torch.get_num_threads() == 2


def test_one_thread_is_as_fast_as_one() -> None:
    torch.set_num_threads(1)

    assert cpu_threads.check_threads(torch.float32) == 1.0


@pytest.mark.parametrize(("speedup", "is_told"), [(1.0, True), (1.4, True), (1.5, False), (1.9, False)])
def test_threads_that_the_machine_does_not_give_are_told(
    speedup: float, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(2)
    monkeypatch.setattr(cpu_threads, "measure_speedup", lambda _: speedup)

    assert cpu_threads.check_threads(torch.float32) == speedup
    assert ("with 2 threads a matrix product is only" in caplog.text) is is_told


def test_a_team_of_threads_bears_the_name_of_the_thread_that_computes() -> None:
    def names() -> list[str]:
        found = []
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # another thread, which ended just now
                found.append((task / "comm").read_text().strip())
        return found

    def compute() -> None:
        torch.set_num_threads(2)
        with os_thread_name("engine under test"):
            torch.ones(512, 512) @ torch.ones(512, 512)
            seen.extend(names())
        seen_after.extend([Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip()])

    seen: list[str] = []
    seen_after: list[str] = []
    own = Path("/proc/self/task") / str(threading.get_native_id()) / "comm"
    before = own.read_text().strip()
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()

    assert seen.count("engine under te") >= 2
    assert seen_after == [before]
    assert own.read_text().strip() == before


SETTLING = """
import json, os, sys, threading
os.sched_setaffinity(0, json.loads(sys.argv[1]))
import torch
from engine.device.cores import run_anywhere
from engine.frontend.os_threads import os_thread_name
from engine.runner.cpu_threads import settle_threads

def team():
    return [int(t.name) for t in os.scandir("/proc/self/task") if open(t.path + "/comm").read().strip() == "team"]

def compute():
    torch.set_num_threads(int(sys.argv[2]))
    with os_thread_name("team"):
        torch.ones(512, 512) @ torch.ones(512, 512)
        told["pinned"] = settle_threads()
        torch.ones(512, 512) @ torch.ones(512, 512)
        told["cores"] = sorted(sorted(os.sched_getaffinity(task)) for task in team())
        told["niceness"] = [os.getpriority(os.PRIO_PROCESS, task) for task in team()]
        other = threading.Thread(target=lambda: (run_anywhere(), told.update(other=sorted(os.sched_getaffinity(0)))))
        other.start()
        other.join()

told = {}
thread = threading.Thread(target=compute)
thread.start()
thread.join()
print(json.dumps(told))
"""


def settle_in_a_process(cores: list[int], num_threads: int, **environment: str) -> dict[str, list[object]]:
    """The result of settling ``num_threads`` in a process that may use ``cores``."""
    command = [sys.executable, "-c", SETTLING, json.dumps(cores), str(num_threads)]
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True, timeout=120)
    told: dict[str, list[object]] = json.loads(done.stdout)
    return told


def test_threads_that_take_all_cores_have_one_each() -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]

    told = settle_in_a_process(cores, 2)

    assert told["pinned"] == cores
    assert told["cores"] == [[core] for core in cores]
    assert told["niceness"] == [EXPECTED_NICENESS] * 2
    assert told["other"] == cores


@pytest.mark.parametrize(
    ("num_cores", "num_threads", "variables"), [(1, 1, {}), (2, 1, {}), (2, 2, {"OMP_PLACES": ""})]
)
def test_threads_are_free_to_move_otherwise(num_cores: int, num_threads: int, variables: dict[str, str]) -> None:
    cores = sorted(os.sched_getaffinity(0))[:num_cores]

    told = settle_in_a_process(cores, num_threads, **variables)

    assert told["pinned"] == []
    assert told["cores"] == [cores] * num_threads
    assert told["niceness"] == [EXPECTED_NICENESS] * num_threads
