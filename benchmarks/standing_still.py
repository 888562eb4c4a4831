"""Stops the servers that are not measured, so that several can run side by side and take turns of seconds.

The speed of a virtual machine changes within seconds, with its neighbours' load. Sides that alternate in turns of
seconds see the same changes; sides that are measured minutes apart do not. Linux only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence

import psutil

from benchmarks.cpu_watch import CpuWatch

STOP_TIMEOUT_S = 10.0
POLL_PERIOD_S = 0.001


@contextlib.contextmanager
def standing_still(servers: Sequence[CpuWatch]) -> Iterator[None]:
    """Stop all processes of these servers for the block; they continue after it, even after an error.

    Raises:
        TimeoutError: A process did not stop.
    """
    stopped: set[psutil.Process] = set()
    try:
        for server in servers:
            _stop(server, stopped)
        yield
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def _stop(server: CpuWatch, stopped: set[psutil.Process]) -> None:
    """Stop all processes of a server and add them to ``stopped``.

    A process may start another between the look and its stop. So look until there is no new one: what stands still
    starts nothing.
    """
    while started := server.processes() - stopped:
        for process in started:
            stopped.add(process)
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        _wait_until_stopped(started)


def _wait_until_stopped(processes: Iterable[psutil.Process]) -> None:
    """Wait until the kernel has stopped all processes: a signal is only pending until its process gets a core."""
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"process {process.pid} did not stop within {STOP_TIMEOUT_S:g} s of SIGSTOP")
                time.sleep(POLL_PERIOD_S)
