"""Stops a process for a while, as if its machine were busy."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil


@asynccontextmanager
async def standing_still(pid: int) -> AsyncIterator[float]:
    """The process is stopped (SIGSTOP) inside the block; yields since when."""
    os.kill(pid, signal.SIGSTOP)
    try:
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110 (the kernel tells nobody)
            await asyncio.sleep(0.01)
        yield time.monotonic()
    finally:
        os.kill(pid, signal.SIGCONT)
