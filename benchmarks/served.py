"""A cluster of its own for a benchmark: `baton serve` as a process, stopped at the end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0


def free_port() -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def served_cluster(arguments: Sequence[str], *, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run ``baton serve`` with ``arguments`` on a free port; yields its URL once it is ready.

    ``environment`` is added to this process's.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("baton")), "serve", "--port", str(port), *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
        try:
            wait_until_ready(f"{url}/ready", process, START_TIMEOUT_S)
            yield url
        except RuntimeError:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-4000:])
            raise
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


@contextmanager
def served_stage(module: str, *arguments: str, environment: Mapping[str, str]) -> Iterator[int]:
    """Run a module that prints ``ready`` and serves until its standard input ends; yields its process id.

    ``environment`` is added to this process's.

    Raises:
        RuntimeError: It did not start; the end of what it wrote is shown.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **environment},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if line.strip() != "ready":
                log.seek(0)
                sys.stderr.write(log.read().decode(errors="replace")[-4000:])
                raise RuntimeError(f"{module} {' '.join(arguments)} did not start: {line!r}")
            yield process.pid
        finally:
            process.stdin.close()
            process.wait(STOP_TIMEOUT_S)


def wait_until_ready(
    url: str, process: subprocess.Popen[bytes], timeout_s: float, *, poll_period_s: float = 0.2
) -> None:
    """Request ``url`` until it answers 200.

    Raises:
        RuntimeError: The process ended, or the time is up.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server behind {url} ended with exit code {process.returncode}")
        try:
            if httpx.get(url, timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(poll_period_s)
    raise RuntimeError(f"{url} was not ready within {timeout_s:.0f} s")
