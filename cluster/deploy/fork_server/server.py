"""The fork server: loads the modules that a cluster's processes share, once, and forks whenever it is asked to.

The fork goes on as the process that asked would have: with its environment, standard files and limits, and with Ray's
script for workers. It loads only Ray itself, which must not be forked: it draws random identifiers and reads its
settings while it is loaded. A fork needs a process with one thread, so no module may start another one when it is
loaded, nor use a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.deploy.fork_server.ask import FORKED, LENGTH, STANDARD_FILES
from cluster.serve.process_start import loading
from engine.device.torch_environment import prepare_torch

RECEIVE_TIMEOUT_S = 10.0

ROUTER_MODULES = (
    "router.api.app",
    "router.service",
    "router.telemetry.tracer",
    "router.telemetry.worker_spans",
    "router.wire.frame_link",
    "router.wire.frame_server",
)
ENGINE_MODULES = (
    "engine.build",
    "engine.frontend.async_engine",
    "engine.runner.cpu_threads",
    "engine.runner.step_threads",
    "kv_transfer.factory",
)
RAY_NEEDS = ("fastapi", "filelock", "jsonschema", "psutil", "requests", "uvicorn", "uvloop", "yaml")
"""What Ray and Serve load themselves."""

OOM_SCORE_ADJUSTMENT = "1000"
"""Ray's default for its workers: when memory is short, the system ends them before Ray's own processes."""

OOM_SCORE_VARIABLE = "RAY_worker_oom_score_adjustment"
ENGINES = "engines"
"""The argument that asks for ``ENGINE_MODULES``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a fork takes over from the process that asked for it. ``files``: its standard files, open here."""

    script: list[str]
    environment: dict[str, str]
    folder: str
    limits: list[tuple[str, int, int]]
    niceness: int
    blocked_signals: list[int]
    files: list[int]

    def close(self) -> None:
        """Close the files here."""
        for file in self.files:
            os.close(file)

    def take(self) -> None:
        """Make this process the one that runs there."""
        for number, file in zip(STANDARD_FILES, self.files, strict=True):
            os.dup2(file, number)
        self.close()
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        for name, soft, hard in self.limits:
            with contextlib.suppress(OSError, ValueError):  # not every user may raise every limit
                resource.setrlimit(getattr(resource, name), (soft, hard))
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, self.niceness)
        with contextlib.suppress(OSError):
            adjustment = self.environment.get(OOM_SCORE_VARIABLE, OOM_SCORE_ADJUSTMENT)
            Path("/proc/self/oom_score_adj").write_text(adjustment)
        source = sys.modules.get("numpy.random")
        if source is not None:  # Python's own source gets a new seed in every fork, this one does not
            source.seed()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked_signals)

    def run(self) -> None:
        """Run the script, as Python does with a script that it is started with."""
        sys.argv = list(self.script)
        sys.path.insert(0, str(Path(self.script[0]).parent))
        runpy.run_path(self.script[0], run_name="__main__")


def load(modules: Iterable[str]) -> None:
    """Load modules. One that cannot be loaded is left to the processes that need it, which say why."""
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)


def next_place(listener: socket.socket, *, owner: int) -> Place | None:
    """Answer requests for forks. Returns in each fork, with its place; and here, with None, once ``owner`` ends: a file
    that the process that started us keeps open while it lives.
    """
    # Forks that ended go at once: to a raylet a process that still waits to be reaped looks alive.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while owner not in select.select([listener.fileno(), owner], [], [])[0]:
        with listener.accept()[0] as connection:
            connection.settimeout(RECEIVE_TIMEOUT_S)
            try:
                place = receive(connection)
            except (OSError, ValueError, KeyError, TypeError):  # who asked is gone
                continue
            try:
                pid = os.fork()
            except OSError:  # no memory, or too many processes: who asked runs its command itself
                place.close()
                continue
            if pid == 0:
                listener.close()
                return place
            place.close()
            with contextlib.suppress(OSError):
                connection.sendall(FORKED)
    return None


def receive(connection: socket.socket) -> Place:
    """Read a request.

    Raises:
        OSError, ValueError, KeyError, TypeError: It is not complete, and nothing is left open.
    """
    head, files, _, _ = socket.recv_fds(connection, LENGTH.size, len(STANDARD_FILES))
    try:
        if len(head) != LENGTH.size or len(files) != len(STANDARD_FILES):
            raise ValueError("the request has no head")
        (length,) = LENGTH.unpack(head)
        content = bytearray()
        while len(content) < length:
            part = connection.recv(length - len(content))
            if not part:
                raise ValueError("the request ends early")
            content += part
        fields: dict[str, Any] = json.loads(content)
        return Place(files=files, **fields)
    except BaseException:
        for file in files:
            os.close(file)
        raise


def main() -> None:
    """Serve on the socket whose file descriptor is the first argument, while standard input is open."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    # As in Ray's actors. More threads would be started when libraries are loaded; engines set their number themselves.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    prepare_torch(None)
    with loading():
        load(ROUTER_MODULES + RAY_NEEDS)
        if ENGINES in sys.argv:
            load(ENGINE_MODULES)
    place = next_place(listener, owner=sys.stdin.fileno())
    if place is None:
        os._exit(0)  # to clean up all those modules would take a quarter of a second
    place.take()
    place.run()


if __name__ == "__main__":
    main()
