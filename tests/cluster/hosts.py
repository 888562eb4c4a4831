"""Hosts on one machine: each with its own address, processes, temporary files, shared memory, home and ssh server."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.cluster.network import Link, Network, run

TOP = Path("/baton-hosts")
"""Where every host has files of its own under the same name."""

HOME = TOP / "home"
FOLDERS = Path("/var/tmp")
FOLDER_PREFIX = "baton-hosts-"
DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
"""Prefix of commands that must not outlive these tests, even if the tests are killed."""

INIT = Path(__file__).with_name("host_init.sh")
START_TIMEOUT_S = 120.0
COMMAND_TIMEOUT_S = 300.0
POLL_PERIOD_S = 0.05


@dataclass(slots=True, kw_only=True)
class Host:
    """One of them, while it runs."""

    link: Link
    init: subprocess.Popen[bytes]
    key: Path
    log: Path
    disk: Path
    """The host's home, as this machine sees it."""

    @property
    def address(self) -> str:
        """Where others reach it."""
        return str(self.link.address)

    def ssh(self, command: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """Run a command in a login shell on the host."""
        return subprocess.run(
            self._in_shell(command),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )

    def _in_shell(self, command: str) -> list[str]:
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "BatchMode=yes")
        return [
            *("ssh", "-F", "none", "-i", str(self.key), *(part for option in options for part in ("-o", option))),
            *(f"root@{self.address}", "bash", "-lc", shlex.quote(f"source ~/.bashrc; {command}")),
        ]

    @contextlib.contextmanager
    def running(self, command: str) -> Iterator[str]:
        """Run a command until its standard input is closed; yields the first line that it prints."""
        shell = self._in_shell(command)
        with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                yield process.stdout.readline().strip()
            finally:
                process.stdin.close()

    def run(self, command: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Run a command on the host that must succeed; what it printed."""
        result = self.ssh(command, timeout_s=timeout_s)
        assert result.returncode == 0, f"{self.address}: {command}: {result.returncode}\n{result.stdout}{result.stderr}"
        return result.stdout

    def processes(self) -> list[psutil.Process]:
        """Everything that runs on the host, as this machine sees it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.init.pid).children(recursive=True)
        return []

    def kill(self) -> None:
        """End all its processes at once, as a power cut would."""
        left = self.processes()
        self.init.kill()  # `unshare --kill-child` takes the first process along, and that one its whole namespace
        self.init.wait()
        psutil.wait_procs(left, timeout=START_TIMEOUT_S)


class Hosts:
    """A network with hosts on it. ``variables`` are in the environment of every shell on them."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables = variables
        self.network = Network()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=FOLDERS))
        self.key = self.folder / "key"
        self._hosts: list[Host] = []

    def open(self) -> None:
        """Make the bridge, the key, and the folder that every host covers."""
        remove_leftovers()
        TOP.mkdir(exist_ok=True)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key))
        self.network.open()

    def add(self) -> Host:
        """Start another host; it answers over ssh when this returns."""
        host = self._boot(self.network.add_link())
        self._hosts.append(host)
        return host

    def restart(self, host: Host) -> None:
        """Boot a host again that was killed: what it had in its home is still there, and nothing else."""
        host.link.mend()
        host.init = self._boot(host.link).init

    def kill_all(self) -> None:
        """End every process of every host."""
        for host in self._hosts:
            host.kill()

    def close(self) -> None:
        """Kill every host and remove everything."""
        self.kill_all()
        self.network.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            TOP.rmdir()

    def _boot(self, link: Link) -> Host:
        log = self.folder / f"{link.namespace}.log"
        command = [
            *DIES_WITH_US,
            *("ip", "netns", "exec", link.namespace),
            *("unshare", "--pid", "--fork", "--mount", "--uts", "--ipc", "--mount-proc", "--kill-child=SIGKILL"),
            *("bash", str(INIT), link.namespace, str(TOP), str(self._disk(link)), *environment_folders()),
        ]
        with log.open("ab") as output:
            init = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
                start_new_session=True,
            )
        host = Host(link=link, init=init, key=self.key, log=log, disk=self._disk(link))
        self._wait_for_ssh(host)
        return host

    def _disk(self, link: Link) -> Path:
        """The content of a host's home, which is made once, with an environment in which Baton's dependencies are
        installed.
        """
        disk = self.folder / link.namespace
        if disk.exists():
            return disk
        environment = disk / "baton-venv"
        environment.mkdir(parents=True)
        for entry in Path(sys.prefix).iterdir():
            (environment / entry.name).symlink_to(entry)
        (environment / ".installed").unlink(missing_ok=True)
        (environment / ".installed").touch()
        (disk / ".ssh").mkdir(mode=0o700)
        shutil.copy(f"{self.key}.pub", disk / ".ssh" / "authorized_keys")
        # Dependencies come from the environment of these tests, Baton itself from the checkout that was sent.
        variables = {
            "PYTHONPATH": f"{HOME}/baton",
            "NUMBA_CACHE_DIR": str(self.folder / "numba"),  # compiled once for all hosts
            "OMP_NUM_THREADS": "1",
            # Several Rays start on the cores of one machine.
            "RAY_raylet_start_wait_time_s": "60",
            "RAY_agent_register_timeout_ms": "180000",
            **self.variables,
        }
        lines = [f"export {name}={value}" for name, value in variables.items()]
        (disk / ".bashrc").write_text("\n".join(lines) + "\n")
        return disk

    def _wait_for_ssh(self, host: Host) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while host.ssh("true", timeout_s=START_TIMEOUT_S).returncode != 0:
            if host.init.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"host {host.address} did not come up:\n{host.log.read_text(errors='replace')}")
            time.sleep(POLL_PERIOD_S)


def environment_folders() -> Sequence[str]:
    """The folders of the Python environment that these tests run in: hosts share them, as if installed there."""
    return sorted({str(Path(folder).resolve()) for folder in (sys.prefix, sys.base_prefix)})


def remove_leftovers() -> None:
    """Remove the files of runs that were killed: those whose process is gone."""
    for folder in FOLDERS.glob(f"{FOLDER_PREFIX}*-*"):
        process_id = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if process_id.isdigit() and not psutil.pid_exists(int(process_id)):
            shutil.rmtree(folder, ignore_errors=True)
