"""A Ray that runs on its own, as an operator would start it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.cluster import POLL_PERIOD_S, STOP_TIMEOUT_S, free_port

RAY = Path(sys.executable).parent / "ray"
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRayProcess:
    """Where it listens, and what a client needs in its environment."""

    process: psutil.Process
    address: str
    environment: Mapping[str, str]

    def children(self) -> list[str]:
        """Names of the processes below it."""
        return [child.name() for child in self.process.children(recursive=True)]

    def wait_until_serve_is_gone(self) -> None:
        """Return when no process of Serve lives; its controller outlives the call that shuts it down by a moment."""
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while left := [name for name in self.children() if "Serve" in name or "Proxy" in name]:
            if time.monotonic() > deadline_s:
                raise AssertionError(f"left running: {left}")
            time.sleep(POLL_PERIOD_S)


@contextmanager
def shared_ray() -> Iterator[SharedRayProcess]:
    """A head node in the foreground; it ends with the block."""
    folder = Path(tempfile.mkdtemp(prefix="sr-", dir="/tmp"))
    port = free_port()
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0" * 64,
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    }
    command = [
        *(str(RAY), "start", "--head", "--block", f"--port={port}", f"--temp-dir={folder}"),
        *("--num-cpus=2", "--include-dashboard=false", "--object-store-memory=100000000", "--disable-usage-stats"),
        *("--node-ip-address=127.0.0.1", f"--dashboard-agent-listen-port={free_port()}"),
    ]
    with (folder / "log").open("wb") as log:
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **variables}
        )
    process = psutil.Process(started.pid)
    try:
        wait_for(folder / "log", "Ray runtime started")
        yield SharedRayProcess(process=process, address=f"127.0.0.1:{port}", environment=variables)
    finally:
        below = process.children(recursive=True)
        started.terminate()
        started.wait(STOP_TIMEOUT_S)
        _, alive = psutil.wait_procs(below, timeout=STOP_TIMEOUT_S)
        for child in alive:
            child.kill()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(log: Path, text: str) -> None:
    """Return when a file holds ``text``."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while text not in log.read_text(errors="replace"):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"no {text!r} within {START_TIMEOUT_S:.0f} s:\n{log.read_text(errors='replace')}")
        time.sleep(POLL_PERIOD_S)
