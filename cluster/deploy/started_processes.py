"""Finds all descendant processes that were started since a given moment, even if their parents have ended."""

from __future__ import annotations

import contextlib
import ctypes
import sys

import psutil

TERMINATE_TIMEOUT_S = 5.0
WORKER_PREFIX = "ray::"
"""Ray's workers name themselves so, and then by what they run."""

PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h: descendants of this process that lose their parent become its children, not those of init."""


class StartedProcesses:
    """The processes that this process started, directly or indirectly, after this object was made.

    When a raylet is killed, one of its helpers outlives it: it tries for a minute to report the death to a server that
    is gone, too. On Linux the helper then becomes our child; on other systems it is not found.
    """

    def __init__(self) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._others = set(psutil.Process().children(recursive=True))

    def __call__(self) -> list[psutil.Process]:
        """The ones that exist now."""
        return [process for process in psutil.Process().children(recursive=True) if process not in self._others]


def is_named(process: psutil.Process, name: str) -> bool:
    """True when a process has this name; False when it has ended."""
    try:
        return process.name() == name
    except psutil.NoSuchProcess:
        return False


def is_worker(process: psutil.Process) -> bool:
    """True for a process that runs an actor or a task of Ray, or waits for one; False when it has ended."""
    try:
        return process.name().startswith(WORKER_PREFIX)
    except psutil.NoSuchProcess:
        return False


def kill_all(processes: list[psutil.Process]) -> None:
    """Kill processes, and wait until they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=TERMINATE_TIMEOUT_S)
