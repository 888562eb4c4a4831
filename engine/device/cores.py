"""Pins threads to cores and sets their priority, on systems that allow it (Linux)."""

from __future__ import annotations

import os
import sys
import threading


def usable_cores() -> list[int]:
    """The cores that this process may use: those of its main thread, ascending. Empty if the system does not tell."""
    return sorted(os.sched_getaffinity(os.getpid())) if sys.platform == "linux" else []


def stay_on(core: int) -> None:
    """Pin this thread, and threads that it starts from now on, to one core."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, {core})


def run_anywhere() -> None:
    """Let this thread run on any core: for a thread that a pinned thread started."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, usable_cores())


def step_back(niceness: int) -> None:
    """Lower the priority of this thread, and of threads that it starts, to ``niceness``."""
    if sys.platform == "linux":
        own = threading.get_native_id()  # on Linux, priorities belong to threads
        os.setpriority(os.PRIO_PROCESS, own, max(niceness, os.getpriority(os.PRIO_PROCESS, own)))
