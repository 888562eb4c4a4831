"""A server and all processes that it starts, in a process group of their own that ends with the benchmark."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.served import wait_until_ready

STOP_TIMEOUT_S = 30.0
LOG_TAIL_BYTES = 8000


def end_on_sigterm() -> None:
    """Let SIGTERM end this process like an error, so that the servers that it runs are stopped too."""
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def end_group(process: subprocess.Popen[Any], timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Ask the leader of a group to stop. Processes of the group that remain after ``timeout_s`` are killed."""
    try:
        if process.poll() is None:
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_TIMEOUT_S)


@contextlib.contextmanager
def served_group(
    command: Sequence[str], *, ready_url: str, environment: Mapping[str, str], directory: Path, start_timeout_s: float
) -> Iterator[None]:
    """Run a server in ``directory``; yields once ``ready_url`` answers. If it does not, the end of the server's log is
    shown.

    Raises:
        RuntimeError: It ended, or was not ready in time.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=directory,
            start_new_session=True,
        )
        try:
            wait_until_ready(ready_url, process, start_timeout_s)
            yield
        except Exception:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(0, end - LOG_TAIL_BYTES))
            sys.stderr.write(log.read().decode(errors="replace"))
            raise
        finally:
            end_group(process)
