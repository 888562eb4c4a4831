"""The processes that came since a moment, at any depth: those too whose parents ended without them."""

from __future__ import annotations

import contextlib
import ctypes
import sys

import psutil

TERMINATE_TIMEOUT_S = 5.0
PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h: what loses its parent below this process becomes its child, and not init's."""


class StartedProcesses:
    """What this process started after this was made, directly or not.

    A helper of Ray outlives its raylet when that is killed: it wants to report the death to a server that is gone, too,
    and waits for a minute. On Linux it is ours from then on; elsewhere it is not found.
    """

    def __init__(self) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._others = set(psutil.Process().children(recursive=True))

    def __call__(self) -> list[psutil.Process]:
        """Those that are there now."""
        return [process for process in psutil.Process().children(recursive=True) if process not in self._others]


def is_named(process: psutil.Process, name: str) -> bool:
    """Whether a process is called so; what ended meanwhile is called nothing."""
    try:
        return process.name() == name
    except psutil.NoSuchProcess:
        return False


def kill_all(processes: list[psutil.Process]) -> None:
    """Kill processes, and wait until they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=TERMINATE_TIMEOUT_S)
