"""On which cores a thread runs, and how soon, where the system lets a thread say so (Linux)."""

from __future__ import annotations

import os
import sys
import threading


def usable_cores() -> list[int]:
    """The cores that this process may use: those of its main thread, in their order. None where nobody can tell."""
    return sorted(os.sched_getaffinity(os.getpid())) if sys.platform == "linux" else []


def stay_on(core: int) -> None:
    """This thread runs on one core from now on, and so do threads that it starts."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, {core})


def run_anywhere() -> None:
    """This thread runs on whatever core is free: for threads that one starts which stays on its own."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, usable_cores())


def step_back(niceness: int) -> None:
    """Let threads of a lower niceness go before this one, and before those that it starts."""
    if sys.platform == "linux":
        own = threading.get_native_id()  # priorities are a thread's on Linux
        os.setpriority(os.PRIO_PROCESS, own, max(niceness, os.getpriority(os.PRIO_PROCESS, own)))
