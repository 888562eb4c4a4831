"""Starts Ray on a machine that may be busy. Retries while attempts make progress; gives up after two that do not.

Ray's timeouts for its own processes cannot be configured. A raylet ends if its helpers have not told it their ports
within 15 s, and `ray.init` fails if the raylet is not registered within 30 s, even if the start still makes progress.
This module replaces these waits. It also keeps Ray from starting processes that a single node does not need. It patches
private parts of Ray, which is pinned to one version; every test with a cluster would show a change.
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
"""Time for all attempts together. An attempt that began before the end of this time is finished."""

SLOW_S = 10.0
"""An attempt that fails sooner did not fail because the machine was slow."""

QUIET_S = 15.0
"""If an attempt's logs did not grow for this long before it failed, it had stopped making progress."""

MAX_FRUITLESS = 2
POLL_PERIOD_S = 0.2
LISTEN_PORT = "dashboard_agent_listen_port"
HELPERS = (LISTEN_PORT, "runtime_env_agent_port", "metrics_agent_port", "metrics_export_port")

UNUSED = {"no_monitor": True, "include_log_monitor": False}
"""The autoscaler's monitor, and the log monitor, which sends logs to drivers: our driver reads the files instead."""

AGENTS = ("--dashboard_agent_command", "--runtime_env_agent_command")
"""The agents that a raylet starts: one serves metrics and logs, the other prepares runtime environments, which our
workers do not use."""

WORKERS = "--python_worker_command"
"""The command by which a raylet starts workers."""

STAND_IN = "import ctypes, os, signal; ctypes.CDLL(None).prctl(1, signal.SIGKILL); os.getppid() == 1 or signal.pause()"
"""Stands in for an agent: does nothing while the raylet lives (1: PR_SET_PDEATHSIG). A raylet ends without agents."""

logger = logging.getLogger(f"baton.{__name__}")


class NotStartedError(Exception):
    """Ray did not start. The message has the number of attempts, their time, and the last error."""


def start_patiently(
    start: Callable[[], None],
    clean_up: Callable[[], None],
    *,
    folder: Path,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> None:
    """Call ``start`` until it succeeds, and ``clean_up`` after each failure. ``folder`` has the logs of the start.

    Raises:
        NotStartedError: Two attempts failed without progress, or attempts failed for ``PATIENCE_S``.
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
    worker_command: Callable[[str], str] = str,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> Iterator[None]:
    """In this context, a Ray that starts slowly is not ended. Its raylet is told the ports of its helpers, so it does
    not wait for them. The raylet itself is waited for while it lives and files in its ``folder`` change, but for at
    most ``PATIENCE_S``. Processes that one node does not need are not started: ``UNUSED``, ``AGENTS``, and the
    dashboard's server, which Ray starts and waits for even when the dashboard is off. This saves 2 s of a core.
    The raylet starts its workers by what ``worker_command`` makes of Ray's own command.
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
        if is_raylet and ports:  # Ray passes the other three ports to its raylet itself
            command = [
                *(_replaced(argument, worker_command) for argument in command),
                f"--{LISTEN_PORT}={ports[LISTEN_PORT]}",
            ]
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


def _replaced(argument: str, worker_command: Callable[[str], str]) -> str:
    """A command-line argument of the raylet, with ``STAND_IN`` in place of an agent's command."""
    name, _, value = argument.partition("=")
    if name == WORKERS:
        return f"{name}={worker_command(value)}"
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
        except OSError:  # gone in the meantime
            continue
    return newest_s
