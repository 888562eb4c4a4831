"""A Ray that runs independently, as an operator would start it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.deploy.serve_env import node_environment
from tests.support.cluster.cluster import COMMAND_TIMEOUT_S, POLL_PERIOD_S, STOP_TIMEOUT_S
from tests.support.cluster.ports import free_port

RAY = Path(sys.executable).parent / "ray"
SERVE = Path(sys.executable).parent / "serve"
START_TIMEOUT_S = 240.0
START_ATTEMPTS = 3
ORPHAN_TIMEOUT_S = 5.0
"""For processes that outlive their Ray: a replica of Serve would otherwise drain for 30 s for nobody."""

SECOND_NODE_IP = "127.0.0.2"

PORTS_OF_A_NODE = ("--min-worker-port=0", "--max-worker-port=0")
"""Workers listen where the system lets them: by default every Ray of a machine tries the same ports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRayProcess:
    """A running Ray: its address, and the environment variables that clients need."""

    process: psutil.Process
    address: str
    environment: Mapping[str, str]
    logs: Path

    def said(self, *words: str) -> list[str]:
        """Logged lines of routers and workers that contain one of these words, in order of time."""
        found: set[str] = set()
        for log in self.logs.glob("worker-*.err"):
            with contextlib.suppress(OSError):  # it was rotated just now
                lines = log.read_text(errors="replace").splitlines()
                found.update(line for line in lines if any(word in line for word in words))
        return sorted(found)

    def children(self) -> list[str]:
        """Names of the processes below it."""
        names = []
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended just now
                names.append(child.name())
        return names

    def wait_until_serve_is_gone(self) -> None:
        """Return once no process of Serve lives; its controller briefly outlives the call that shuts it down."""
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while left := [name for name in self.children() if "Serve" in name or "Proxy" in name]:
            if time.monotonic() > deadline_s:
                raise AssertionError(f"left running: {left}")
            time.sleep(POLL_PERIOD_S)


@contextmanager
def second_node(ray: SharedRayProcess) -> Iterator[psutil.Process]:
    """Another node of the same Ray, on this machine too; it ends with the block, if it did not before."""
    with tempfile.TemporaryDirectory(prefix="sn-", dir="/tmp") as folder:
        log = Path(folder) / "log"
        command = [
            *(str(RAY), "start", "--block", f"--address={ray.address}", "--num-cpus=2", "--disable-usage-stats"),
            *(f"--node-ip-address={SECOND_NODE_IP}", "--object-store-memory=100000000"),
            *PORTS_OF_A_NODE,
            f"--dashboard-agent-listen-port={free_port()}",
        ]
        with running(command, log, ray.environment) as process:
            yield process


@contextmanager
def shared_ray() -> Iterator[SharedRayProcess]:
    """A head node in the foreground; it ends with the block."""
    folder = Path(tempfile.mkdtemp(prefix="sr-", dir="/tmp"))
    port = free_port()
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0" * 64,
        **node_environment(),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    }
    command = [
        *(str(RAY), "start", "--head", "--block", f"--port={port}", f"--temp-dir={folder}"),
        *("--num-cpus=2", "--include-dashboard=false", "--object-store-memory=100000000", "--disable-usage-stats"),
        *("--node-ip-address=127.0.0.1", f"--dashboard-agent-listen-port={free_port()}"),
        *(f"--ray-client-server-port={free_port()}", f"--dashboard-port={free_port()}", *PORTS_OF_A_NODE),
    ]
    try:
        with running(command, folder / "log", variables) as process:
            address, logs = f"127.0.0.1:{port}", folder / "session_latest" / "logs"
            yield SharedRayProcess(process=process, address=address, environment=variables, logs=logs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def running(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> Iterator[psutil.Process]:
    """A running `ray start --block`, stopped with all its child processes. Ray's processes stop by themselves if it
    fails.
    """
    started = start(command, log, variables)
    process = psutil.Process(started.pid)
    try:
        yield process
    finally:
        below = process.children(recursive=True) if started.poll() is None else []
        started.terminate()
        started.wait(STOP_TIMEOUT_S)
        _, alive = psutil.wait_procs(below, timeout=ORPHAN_TIMEOUT_S)
        for child in alive:
            child.kill()
        psutil.wait_procs(alive, timeout=STOP_TIMEOUT_S)


def start(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start Ray; retries once, because on a busy machine a raylet may miss its time limit of 15 s for its helpers."""
    for _ in range(START_ATTEMPTS):
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, **variables}
            )
        if is_up(process, log):
            return process
    raise AssertionError(f"Ray ended {START_ATTEMPTS} times:\n{log.read_text(errors='replace')}")


def is_up(process: subprocess.Popen[bytes], log: Path) -> bool:
    """True once Ray says that it runs, False when the command ended."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None:
        told = log.read_text(errors="replace")
        if "Ray runtime started" in told:
            return True
        if time.monotonic() > deadline_s:
            process.kill()
            raise AssertionError(f"Ray did not start within {START_TIMEOUT_S:.0f} s:\n{told}")
        time.sleep(POLL_PERIOD_S)
    return False


def run_on(ray: SharedRayProcess, statement: str) -> str:
    """Run a statement in another driver; returns what it printed."""
    script = f"import ray; from ray import serve; ray.init('{ray.address}', log_to_driver=False); {statement}"
    return _run(ray, sys.executable, "-c", script).strip()


def serve_run(ray: SharedRayProcess, file: Path) -> None:
    """Have Serve apply a configuration file, as `serve deploy` does where a dashboard runs; it returns at once."""
    _run(ray, str(SERVE), "run", "--non-blocking", "--address", ray.address, str(file))


def _run(ray: SharedRayProcess, *command: str) -> str:
    result = subprocess.run(
        command,
        env={**os.environ, **ray.environment},
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
