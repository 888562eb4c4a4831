"""Workers of a private Ray are forks of one process, and differ in nothing from processes that were started."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.config.config import BatonConfig
from cluster.deploy.fork_server import fork_server as starting
from cluster.deploy.fork_server.fork_server import ForkServer, fork_server
from cluster.deploy.fork_server.server import ENGINE_MODULES, RAY_NEEDS, ROUTER_MODULES

TIMEOUT_S = 120.0

TELLS = """
import json, os, resource, signal, sys

print(json.dumps({
    "parent": os.getppid(), "own": os.getpid(), "name": __name__, "arguments": sys.argv, "path": sys.path[0],
    "folder": os.getcwd(), "environment": dict(os.environ), "input": sys.stdin.read(), "niceness": os.nice(0),
    "limits": [resource.getrlimit(limit) for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "modules": sorted(sys.modules),
    "waits_for_children": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
    "files": sorted(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")),
    "oom_score": int(open("/proc/self/oom_score_adj").read()),
}))
print("an error", file=sys.stderr)
"""

DRAWS = """
import json, os, random, uuid

import numpy

identifiers = [random.random(), numpy.random.random(), uuid.uuid4().hex]
import ray
print(json.dumps([*identifiers, ray.ObjectRef.from_random().hex(), ray._raylet.WorkerID.from_random().hex()]))
"""

WAITS = "import signal; print(flush=True); signal.pause()"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with contextlib.closing(ForkServer(tmp_path_factory.mktemp("server"), loads_engines=True)) as server:
        yield server


def command_of(script: Path, *arguments: str) -> str:
    """A worker's command, as Ray makes it for its raylet."""
    return shlex.join([sys.executable, "/ray/setup_worker.py", str(script), *arguments, "--language=PYTHON"])


def run(server: ForkServer, command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run what a raylet runs, to its end and that of the fork, which closes the output."""
    return subprocess.run(
        shlex.split(server.command_for(command)), capture_output=True, text=True, timeout=TIMEOUT_S, **options
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "default_worker.py"
    file.write_text(TELLS)
    return file


def test_fork_goes_on_as_the_process_that_asked_for_it(server: ForkServer, script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()

    def limit() -> None:
        os.nice(3)
        resource.setrlimit(resource.RLIMIT_NOFILE, (123, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGINT})

    done = run(
        server, command_of(script, "--port=1", "x"), input="asked", cwd=folder, env={"ONLY": "one"}, preexec_fn=limit
    )

    told = json.loads(done.stdout)
    assert (told["parent"], done.returncode, done.stderr) == (server.pid, 0, "an error\n")
    assert (told["name"], told["arguments"]) == ("__main__", [str(script), "--port=1", "x"])
    assert (told["path"], told["folder"], told["input"]) == (str(script.parent), str(folder), "asked")
    told["environment"].pop("LC_CTYPE", None)  # which Python sets itself
    assert (told["environment"], told["niceness"]) == ({"ONLY": "one"}, os.nice(0) + 3)
    assert told["limits"][0][0] == 123
    assert told["limits"][1] == list(resource.getrlimit(resource.RLIMIT_CORE))
    assert (told["blocked"], told["waits_for_children"]) == ([signal.SIGINT], True)
    assert told["oom_score"] == 1000


def test_modules_are_loaded_in_one_thread_and_ray_is_not(server: ForkServer, script: Path) -> None:
    told = json.loads(run(server, command_of(script)).stdout)

    assert set(told["modules"]) >= {*ROUTER_MODULES, *ENGINE_MODULES, *RAY_NEEDS, "torch"}
    assert "ray" not in told["modules"]
    assert told["threads"] == 1
    assert len(told["files"]) == len((0, 1, 2, "the folder that was listed"))


def test_forks_draw_different_random_numbers(server: ForkServer, tmp_path: Path) -> None:
    file = tmp_path / "draws.py"
    file.write_text(DRAWS)

    first, second = (json.loads(run(server, command_of(file)).stdout) for _ in range(2))

    assert not set(first) & set(second)


def test_fork_that_ended_is_gone(server: ForkServer, script: Path) -> None:
    pid = json.loads(run(server, command_of(script)).stdout)["own"]

    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(TIMEOUT_S)  # for a zombie it would wait until that is reaped


def test_request_that_ends_early_leaves_the_server_to_others(server: ForkServer, script: Path) -> None:
    path = shlex.split(server.command_for(""))[-1]
    for content in (b"", b"x", b"\0\0\0\x09{}"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            connection.sendall(content)

    assert json.loads(run(server, command_of(script)).stdout)["parent"] == server.pid


def test_worker_with_a_runtime_environment_is_set_up_by_ray(server: ForkServer, tmp_path: Path) -> None:
    set_up = tmp_path / "setup_worker.py"
    set_up.write_text("import os, sys; print(os.getppid(), *sys.argv[1:])")
    option = "--serialized-runtime-env-context={}"

    done = run(server, shlex.join([sys.executable, str(set_up), "worker.py", "--language=PYTHON", option]))

    assert done.stdout.split() == [str(os.getpid()), "worker.py", "--language=PYTHON", option]


def test_command_runs_by_itself_where_the_server_is_gone(script: Path, tmp_path: Path) -> None:
    server = ForkServer(tmp_path, loads_engines=False)
    server.close()

    told = json.loads(run(server, command_of(script, "x"), input="").stdout)

    assert (told["parent"], told["arguments"]) == (os.getpid(), [str(script), "x"])


def test_server_ends_with_the_process_that_started_it_and_its_forks_go_on(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    server = ForkServer(tmp_path, loads_engines=False)
    asking = shlex.split(server.command_for(command_of(script)))
    with subprocess.Popen(asking, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as asked:
        assert asked.stdout is not None
        asked.stdout.readline()
        (fork,) = psutil.Process(server.pid).children()

        server.close()

        assert not psutil.pid_exists(server.pid)
        assert fork.is_running()
        fork.kill()


@pytest.mark.parametrize(
    ("device", "has_driver", "loads_engines"),
    [("auto", False, True), ("auto", True, False), ("cuda", True, False), ("cpu", True, True)],
)
def test_engines_that_may_use_a_gpu_load_their_modules_themselves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: Path, device: str, has_driver: bool, loads_engines: bool
) -> None:
    monkeypatch.setattr(starting, "GPU_DRIVER", tmp_path if has_driver else tmp_path / "none")

    with fork_server(BatonConfig(device=device), tmp_path) as server:
        assert server is not None
        process = psutil.Process(server.pid)
        while not (arguments := process.cmdline()):  # empty for a moment after the process has started
            assert process.is_running()

    assert ("engines" in arguments) == loads_engines


def test_shared_ray_has_none() -> None:
    with fork_server(BatonConfig(address="auto"), None) as server:
        assert server is None
