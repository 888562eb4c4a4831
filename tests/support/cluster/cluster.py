"""A real cluster on this machine: `baton serve` as a process, with a Ray session of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.support.cluster.ports import free_port

BATON = Path(sys.executable).parent / "baton"
READY_TIMEOUT_S = 400.0
STOP_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 240.0
POLL_PERIOD_S = 0.1


class ClusterProcess:
    """One `baton serve`, or another long-running command. Its output, sockets and logs are in a folder that it must
    leave empty.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        sample: Path | None = None,
        command: Sequence[str] = ("serve",),
        environment: Mapping[str, str] | None = None,
        group: int | None = None,
    ) -> None:
        """Start it with a configuration, or with a sample file and the configuration as flags.

        Unless it says otherwise roles are fixed: a test knows beforehand that a request is handed over, and to whom.
        Root may name the ``group`` in which it runs.
        """
        self.port = free_port()
        # Not pytest's temporary folder: Ray's socket paths must stay short.
        self.folder = Path(tempfile.mkdtemp(prefix="bt-", dir="/tmp"))
        self.session_folder = self.folder / "s"
        self.session_folder.mkdir()
        self._is_serving = command[0] == "serve"
        config_file = self.folder / "baton.yaml"
        values = {"port": self.port, "roles": "fixed", **config}
        config_file.write_text(yaml.safe_dump(values))
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()] if sample else []
        self._log = (self.folder / "log").open("wb")
        self._process = subprocess.Popen(
            [str(BATON), *command, "--config", str(sample or config_file), *flags],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **(environment or {}), "TMPDIR": str(self.session_folder)},
            start_new_session=True,
            group=group,
        )

    @property
    def url(self) -> str:
        """Where the API answers."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The command's process."""
        return self._process.pid

    @property
    def log(self) -> str:
        """What the command printed so far."""
        return (self.folder / "log").read_text(errors="replace")

    def wait_until_ready(self) -> None:
        """Return once `/ready` says so and `baton serve` has noticed it: if it is stopped before that, its exit code
        differs.
        """
        with httpx.Client(timeout=ANSWER_TIMEOUT_S, trust_env=False) as client:
            self._wait(lambda: is_ready(client, self.url), "ready")
        if self._is_serving:
            self.wait_for_output("Press Ctrl-C to stop")

    def wait_until_pools_have(self, number: int) -> None:
        """Return once the router sees this many workers of each role; it is ready with one."""
        self._wait(lambda: all(len(pool) >= number for pool in self._pools()), f"{number} workers of each kind")

    def _pools(self) -> list[Any]:
        answer: dict[str, Any] = httpx.get(f"{self.url}/status", timeout=ANSWER_TIMEOUT_S, trust_env=False).json()
        return list(answer["pools"].values())

    def wait_for_output(self, text: str) -> None:
        """Return when the command printed ``text``."""
        self._wait(lambda: text in self.log, f"output {text!r}")

    def wait_for_session_folder(self) -> None:
        """Return when the command made the folder of its Ray."""
        self._wait(lambda: any(self.session_folder.iterdir()), "session folder")

    def wait_for_exit(self) -> int:
        """Return the exit code of a command that ends by itself."""
        return self._process.wait(READY_TIMEOUT_S)

    def has_ended(self) -> bool:
        """Whether the command has exited."""
        return self._process.poll() is not None

    def processes(self) -> list[psutil.Process]:
        """The command and everything that it started."""
        command = psutil.Process(self.pid)
        return [command, *command.children(recursive=True)]

    def process_named(self, name: str) -> psutil.Process:
        """The first of these processes with that name. Others may end meanwhile."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                if process.name() == name:
                    return process
        raise AssertionError(f"no process {name}:\n{self.log}")

    def stop(self, signal_number: int = signal.SIGINT) -> int:
        """Ask the command to stop, as Ctrl-C does; its exit code."""
        self._process.send_signal(signal_number)
        return self._process.wait(STOP_TIMEOUT_S)

    def close(self) -> None:
        """Kill what remains, and remove the folder: only needed when a test failed."""
        if self._process.poll() is None:
            for process in self.processes():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait(STOP_TIMEOUT_S)
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait(self, is_true: Any, what: str) -> None:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not is_true():
            if self._process.poll() is not None:
                raise AssertionError(f"baton ended with {self._process.returncode} before {what}:\n{self.log}")
            if time.monotonic() > deadline_s:
                raise AssertionError(f"no {what} within {READY_TIMEOUT_S:.0f} s:\n{self.log}")
            time.sleep(POLL_PERIOD_S)


@contextmanager
def running_cluster(
    sample: Path | None = None, environment: Mapping[str, str] | None = None, **config: Any
) -> Iterator[ClusterProcess]:
    """A cluster that is ready. Afterwards it is stopped with Ctrl-C, and must leave nothing behind."""
    cluster = ClusterProcess(config, sample=sample, environment=environment)
    try:
        cluster.wait_until_ready()
        yield cluster
        processes = cluster.processes()
        code = cluster.stop()
        assert code == 0, cluster.log
        assert_left_nothing(cluster, processes)
    finally:
        cluster.close()


def assert_left_nothing(cluster: ClusterProcess, processes: list[psutil.Process]) -> None:
    """Check that no process of the cluster lives, and that its session folder is empty."""
    alive = [process for process in processes if _is_alive(process)]
    assert not alive, f"left running: {alive}\n{cluster.log}"
    left = sorted(str(path) for path in cluster.session_folder.iterdir())
    assert not left, f"left files: {left}\n{cluster.log}"


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it ended just now
        return False


def run_baton(
    *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [str(BATON), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **(environment or {})},
        check=False,
    )


def is_ready(client: httpx.Client, url: str) -> bool:
    """True when the router sees workers of both kinds."""
    try:
        return client.get(f"{url}/ready").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
