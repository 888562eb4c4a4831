"""A Ray that starts slowly gets more time as long as it makes progress."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from ray._private import parameter, services
from ray._private.ray_constants import PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET

from cluster.deploy.patient_start import (
    AGENTS,
    HELPERS,
    PATIENCE_S,
    QUIET_S,
    SLOW_S,
    STAND_IN,
    NotStartedError,
    patient_ray,
    start_patiently,
)


class SlowStarter:
    """Writes a log for a while in each attempt, stands still for ``quiet_s``, and then gives up, so many times."""

    def __init__(self, folder: Path, *, num_failures: int, busy_s: float, quiet_s: float = 0.0) -> None:
        self._log = folder / "logs" / "raylet.out"
        self._log.parent.mkdir()
        self._num_failures = num_failures
        self._busy_s = busy_s
        self._quiet_s = quiet_s
        self._folder = folder
        self.num_attempts = 0
        self.num_cleaned = 0
        self.now_s = 1_000.0

    def start(self) -> None:
        """One attempt."""
        self.num_attempts += 1
        self.now_s += self._busy_s
        self._log.write_text("still starting")
        os.utime(self._log, (self.now_s, self.now_s))
        os.utime(self._log.parent, (0, 0))
        self.now_s += self._quiet_s
        if self.num_attempts <= self._num_failures:
            raise Exception("The current node timed out during startup.")

    def clean_up(self) -> None:
        """After an attempt that failed."""
        self.num_cleaned += 1

    def run(self) -> None:
        """Start it as a private Ray is."""
        clock = lambda: self.now_s  # noqa: E731
        start_patiently(self.start, self.clean_up, folder=self._folder, clock=clock, wall_clock=clock)


def test_start_that_gets_somewhere_is_tried_until_it_works(tmp_path: Path) -> None:
    slow = SlowStarter(tmp_path, num_failures=6, busy_s=30.0)

    slow.run()

    assert (slow.num_attempts, slow.num_cleaned) == (7, 6)


def test_start_that_gets_somewhere_but_never_works_ends(tmp_path: Path) -> None:
    slow = SlowStarter(tmp_path, num_failures=1000, busy_s=30.0)

    with pytest.raises(NotStartedError, match=r"10 times in 300 s: The current node timed out"):
        slow.run()

    assert slow.num_attempts == slow.num_cleaned == PATIENCE_S / 30.0


@pytest.mark.parametrize(
    ("busy_s", "quiet_s"),
    [pytest.param(SLOW_S / 2, 0.0, id="fails at once"), pytest.param(10.0, 30.0, id="stands still")],
)
def test_start_that_gets_nowhere_is_tried_twice(tmp_path: Path, busy_s: float, quiet_s: float) -> None:
    stuck = SlowStarter(tmp_path, num_failures=1000, busy_s=busy_s, quiet_s=quiet_s)

    with pytest.raises(NotStartedError, match=r"^twice: The current node timed out"):
        stuck.run()

    assert stuck.num_attempts == stuck.num_cleaned == 2


class Nodes:
    """Ray's knowledge of its nodes: none until the raylet has reported, a number of seconds after the start."""

    def __init__(self, folder: Path, *, known_after_s: float, quiet_after_s: float = float("inf")) -> None:
        self._log = folder / "raylet.out"
        self._log.touch()
        self._known_after_s = known_after_s
        self._quiet_after_s = quiet_after_s
        self.now_s = 0.0

    def get(self, gcs_address: str, node_id: str) -> dict[str, str]:
        """Information that `ray.init` asks for."""
        told_s = min(self.now_s, self._quiet_after_s)
        os.utime(self._log, (told_s, told_s))
        os.utime(self._log.parent, (0, 0))
        if self.now_s < self._known_after_s:
            raise RuntimeError("No node info")
        return {"node": node_id, "gcs": gcs_address}

    def pause(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds

    def wait(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
        """Ask as `ray.init` does, while a Ray starts."""
        monkeypatch.setattr(services, "get_node", self.get)
        clock = lambda: self.now_s  # noqa: E731
        with patient_ray(self._log.parent, pause=self.pause, clock=clock, wall_clock=clock):
            node: dict[str, str] = services.get_node("g", "n")
        return node


def test_raylet_that_has_news_is_waited_for_longer_than_ray_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, known_after_s=120.0)

    assert nodes.wait(monkeypatch) == {"node": "n", "gcs": "g"}


@pytest.mark.parametrize(
    ("nodes", "until_s"),
    [
        pytest.param({"known_after_s": 1e9}, PATIENCE_S, id="never known"),
        pytest.param({"known_after_s": 1e9, "quiet_after_s": 20.0}, 20.0 + QUIET_S, id="without news"),
    ],
)
def test_raylet_is_waited_for_with_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: dict[str, float], until_s: float
) -> None:
    stuck = Nodes(tmp_path, **nodes)

    with pytest.raises(RuntimeError, match="No node info"):
        stuck.wait(monkeypatch)

    assert until_s <= stuck.now_s < until_s + 1.0


def test_helpers_have_known_ports_while_a_private_ray_starts_and_only_then(tmp_path: Path) -> None:
    before = parameter.RayParams

    with patient_ray(tmp_path):
        params = parameter.RayParams(num_cpus=1)

    ports = [getattr(params, name) for name in HELPERS]
    assert isinstance(params, before)
    assert params.num_cpus == 1
    assert len({*ports}) == len(HELPERS)
    assert all(ports)
    assert parameter.RayParams is before


class Process:
    """A process of Ray's that runs, or ended."""

    def __init__(self, returncode: int | None) -> None:
        self._returncode = returncode

    def poll(self) -> int | None:
        """How it ended."""
        return self._returncode


def test_raylet_is_told_the_port_that_ray_does_not_tell_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def start_process(command: list[str], process_type: str, **values: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(process=Process(None), type=process_type, **values)

    monkeypatch.setattr(services, "start_ray_process", start_process)
    with patient_ray(tmp_path):
        params = parameter.RayParams()
        services.start_ray_process(["gcs"], PROCESS_TYPE_GCS_SERVER, fate_share=True)
        services.start_ray_process(["raylet", "--head"], PROCESS_TYPE_RAYLET, fate_share=True)

    port = params.dashboard_agent_listen_port
    assert commands == [["gcs"], ["raylet", "--head", f"--dashboard_agent_listen_port={port}"]]
    assert services.start_ray_process is start_process


def test_raylet_that_ended_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(tmp_path, known_after_s=1e9)
    ended = SimpleNamespace(process=Process(1))
    monkeypatch.setattr(services, "get_node", nodes.get)
    monkeypatch.setattr(services, "start_ray_process", lambda *_command, **_values: ended)

    with patient_ray(tmp_path, pause=nodes.pause, clock=lambda: nodes.now_s, wall_clock=lambda: nodes.now_s):
        services.start_ray_process([], PROCESS_TYPE_RAYLET, fate_share=True)
        with pytest.raises(RuntimeError, match="No node info"):
            services.get_node("g", "n")

    assert nodes.now_s == 0.0


def test_command_that_is_stopped_meanwhile_stops(tmp_path: Path) -> None:
    def start() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start_patiently(start, lambda: None, folder=tmp_path)


def test_what_one_node_has_no_use_for_is_not_started(tmp_path: Path) -> None:
    before = services.start_api_server

    with patient_ray(tmp_path):
        params = parameter.RayParams()
        started = services.start_api_server(include_dashboard=False)

    assert started == (None, None)
    assert (params.no_monitor, params.include_log_monitor) == (True, False)
    assert services.start_api_server is before


def test_agents_of_the_raylet_are_stood_in_for_by_what_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def start_process(command: list[str], *_: object, **__: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(process=Process(None))

    monkeypatch.setattr(services, "start_ray_process", start_process)
    with patient_ray(tmp_path):
        parameter.RayParams()
        services.start_ray_process(["raylet", *(f"{name}=python x.py -u" for name in AGENTS)], PROCESS_TYPE_RAYLET)

    for name, argument in zip(AGENTS, commands[0][1:-1], strict=True):
        assert shlex.split(argument) == [f"{name}={sys.executable}", "-ISc", STAND_IN]


def test_stand_in_ends_with_who_started_it() -> None:
    told = STAND_IN.replace("; os.getppid()", "; print(os.getpid(), flush=True); os.getppid()")
    assert told != STAND_IN
    starts_one = f"import subprocess, sys; subprocess.Popen([sys.executable, '-ISc', {told!r}]); input()"
    parent = subprocess.Popen([sys.executable, "-c", starts_one], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    stand_in = psutil.Process(int(parent.stdout.readline()))
    assert stand_in.is_running()

    parent.kill()
    parent.wait()

    gone, alive = psutil.wait_procs([stand_in], timeout=120)
    assert (gone, alive) == ([stand_in], [])
