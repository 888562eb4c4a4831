"""Starts Ray on a machine that may be busy: again and again while it gets somewhere, and twice where it does not.

How long Ray waits for its own processes cannot be chosen. A raylet ends where its helpers have not told it their ports
within 15 s, and `ray.init` where the raylet is not known within 30 s, whatever still happens. And it starts processes
that one node has no use for: here it does not. What is changed here is private to Ray, which is pinned to one version;
every test with a cluster would show a change.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from ray._private import parameter, services
from ray._private.ray_constants import PROCESS_TYPE_RAYLET

PATIENCE_S = 300.0
"""For all attempts together; one that began before it is over goes to its end."""

SLOW_S = 10.0
"""An attempt that fails sooner did not fail for want of time."""

QUIET_S = 15.0
"""An attempt whose logs did not grow for so long at its end had stopped getting anywhere."""

MAX_FRUITLESS = 2
POLL_PERIOD_S = 0.2
LISTEN_PORT = "dashboard_agent_listen_port"
HELPERS = (LISTEN_PORT, "runtime_env_agent_port", "metrics_agent_port", "metrics_export_port")

UNUSED = {"no_monitor": True, "include_log_monitor": False}
"""The autoscaler's monitor, and the log monitor, which carries logs to drivers: ours reads them from their files."""

AGENTS = ("--dashboard_agent_command", "--runtime_env_agent_command")
"""What a raylet starts beside itself: a server of figures and logs, and one that prepares environments for workers that
ask for one, which ours do not."""

STAND_IN = "import ctypes, os, signal; ctypes.CDLL(None).prctl(1, signal.SIGKILL); os.getppid() == 1 or signal.pause()"
"""Does nothing as long as the raylet lives (1: PR_SET_PDEATHSIG), which would end without them."""

logger = logging.getLogger(f"baton.{__name__}")


class NotStartedError(Exception):
    """It did not start; the message says how often and how long that was tried, and what was said last."""


def start_patiently(
    start: Callable[[], None],
    clean_up: Callable[[], None],
    *,
    folder: Path,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> None:
    """Call ``start`` until it does not fail, and ``clean_up`` after each time that it does. ``folder`` has its logs.

    Raises:
        NotStartedError: It failed twice without having got anywhere, or for ``PATIENCE_S``.
    """
    began_s = clock()
    num_attempts = num_fruitless = 0
    while True:
        num_attempts += 1
        attempt_s = clock()
        try:
            start()
            return
        except Exception as error:  # Ray has no type of its own for this
            got_somewhere = clock() - attempt_s >= SLOW_S and wall_clock() - _last_change_s(folder) <= QUIET_S
            clean_up()
            num_fruitless += not got_somewhere
            took_s = clock() - began_s
            if num_fruitless >= MAX_FRUITLESS or took_s >= PATIENCE_S:
                times = "twice" if num_attempts == MAX_FRUITLESS else f"{num_attempts} times in {took_s:.0f} s"
                raise NotStartedError(f"{times}: {error}") from error
            logger.warning("Ray did not start, trying once more: %s", error)


@contextmanager
def patient_ray(
    folder: Path,
    *,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> Iterator[None]:
    """Within it, a Ray that is started is not ended for being slow: its raylet is told its helpers' ports, so that it
    does not wait for them, and is waited for as long as it lives and something changes in its ``folder``, for
    ``PATIENCE_S`` at most. Nothing is started that one node has no use for: ``UNUSED``, the dashboard's server,
    which Ray starts and waits for where the dashboard is off, too, and ``AGENTS``: together 2 s of a core at each
    start.
    """
    originals = parameter.RayParams, services.start_ray_process, services.get_node, services.start_api_server
    make_params, start_process, get_node, _ = cast("tuple[Any, ...]", originals)
    ports: dict[str, int] = {}
    raylets: list[Any] = []

    def params_with_ports(*args: Any, **values: Any) -> Any:
        ports.update(zip(HELPERS, free_ports(len(HELPERS)), strict=True))
        return make_params(*args, **{**values, **ports, **UNUSED})

    def start_with_ports(command: list[str], process_type: str, *args: Any, **values: Any) -> Any:
        is_raylet = process_type == PROCESS_TYPE_RAYLET
        if is_raylet and ports:  # the only one of the four that Ray does not tell its raylet
            command = [*map(_with_stand_ins, command), f"--{LISTEN_PORT}={ports[LISTEN_PORT]}"]
        started = start_process(command, process_type, *args, **values)
        if is_raylet:
            raylets[:] = [started.process]
        return started

    def get_node_in_time(gcs_address: str, node_id: str) -> Any:
        began_s = clock()
        while True:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError:
                is_late = clock() - began_s > PATIENCE_S or wall_clock() - _last_change_s(folder) > QUIET_S
                if is_late or any(raylet.poll() is not None for raylet in raylets):
                    raise
            pause(POLL_PERIOD_S)

    try:
        _put_in_place(params_with_ports, start_with_ports, get_node_in_time, _no_api_server)
        yield
    finally:
        _put_in_place(*originals)


def _with_stand_ins(argument: str) -> str:
    """An argument of the raylet's, with ``STAND_IN`` for the agents that it would start."""
    name, _, _ = argument.partition("=")
    if name not in AGENTS:
        return argument
    return f"{name}={subprocess.list2cmdline([sys.executable, '-ISc', STAND_IN])}"


def _no_api_server(*_: Any, **__: Any) -> tuple[None, None]:
    """No address, and no process."""
    return None, None


def _put_in_place(make_params: Any, start_process: Any, get_node: Any, start_api_server: Any) -> None:
    parameter.RayParams = make_params  # type: ignore[misc]
    services.start_ray_process = start_process
    services.get_node = get_node
    services.start_api_server = start_api_server


def free_ports(number: int) -> list[int]:
    """TCP ports that were free just now, all different."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _last_change_s(folder: Path) -> float:
    """When something was last written, on the wall clock."""
    newest_s = 0.0
    for path in folder.rglob("*"):
        try:
            newest_s = max(newest_s, path.lstat().st_mtime)
        except OSError:  # gone meanwhile
            continue
    return newest_s
