"""Servers that run beside each other and take turns: while one is measured, all processes of the others stand still.

A virtual machine's speed changes within seconds, with what its neighbours do. Sides whose turns follow each other in
seconds meet the same changes; sides that are measured minutes apart do not. Linux only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import psutil

from benchmarks.cpu_watch import CpuWatch


@contextlib.contextmanager
def standing_still(servers: Sequence[CpuWatch]) -> Iterator[None]:
    """Stop all processes of these servers; they go on at the end, whatever happened."""
    stopped: list[psutil.Process] = []
    try:
        for server in servers:
            for process in server.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
                    stopped.append(process)
        yield
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
