"""The fork server of a private Ray, as the command that starts both sees it."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.config.config import BatonConfig
from cluster.config.names import FORK_SERVER
from cluster.deploy.fork_server import ask
from cluster.deploy.fork_server.server import ENGINES

SOCKET_NAME, LOG_NAME = "fork", "fork.log"
BACKLOG = 64
END_TIMEOUT_S = 5.0
GPU_DRIVER = Path("/dev/nvidiactl")
"""Exists where NVIDIA's driver is loaded."""


class ForkServer:
    """Loads what routers and workers need while Ray starts, and forks for Ray's workers.

    Only this user reaches it: its socket lies in a ``folder`` that no other user may enter. If it ends early, workers
    start without it, and slower.
    """

    def __init__(self, folder: Path, *, loads_engines: bool) -> None:
        self._path = folder / SOCKET_NAME
        arguments = [ENGINES] if loads_engines else []
        with socket.socket(socket.AF_UNIX) as listener, (folder / LOG_NAME).open("wb") as log:
            listener.bind(str(self._path))
            listener.listen(BACKLOG)
            file = listener.fileno()
            with _blocking_sigint():
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", FORK_SERVER, str(file), *arguments],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=[file],
                )

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def command_for(self, command: str) -> str:
        """A shell command that asks for a fork which goes on with ``command``, that of Ray's workers."""
        asking = [sys.executable, "-IS", str(ask.__file__), str(self._path)]
        return f"{subprocess.list2cmdline(asking)} {command}"

    def close(self) -> None:
        """End it. Its forks go on. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def fork_server(config: BatonConfig, folder: Path | None) -> Iterator[ForkServer | None]:
    """A fork server in this context, for a private Ray with its files in ``folder``; None on a shared Ray.

    Where engines may use a GPU they load their modules themselves: a process that used one cannot be forked.
    """
    if folder is None:
        yield None
        return
    loads_engines = config.device == "cpu" or not GPU_DRIVER.exists()
    with contextlib.closing(ForkServer(folder, loads_engines=loads_engines)) as server:
        yield server


@contextmanager
def _blocking_sigint() -> Iterator[None]:
    """Processes that start in this context do not get Ctrl-C, like those that Ray starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
