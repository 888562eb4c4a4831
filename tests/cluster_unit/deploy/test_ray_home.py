"""A private Ray that does not start at once."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private.utils import check_version_info

from cluster.deploy.ray_home import PrivateRay, RayUnavailableError, connect

SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]


class StubbornRay:
    """``ray.init`` that leaves a process behind and fails, so many times."""

    def __init__(self, num_failures: int) -> None:
        self._num_failures = num_failures
        self.started: list[subprocess.Popen[bytes]] = []

    def init(self, **options: Any) -> None:
        """Start, and fail or not."""
        assert options["address"] == "local"
        self.started.append(subprocess.Popen(SLEEPER))
        if len(self.started) <= self._num_failures:
            raise Exception("The current node timed out during startup.")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrivateRay:
    """A Ray whose processes ignore the request to stop, so that waiting for them is of no use."""
    monkeypatch.setattr("cluster.deploy.ray_home.TERMINATE_TIMEOUT_S", 0.5)
    return PrivateRay(folder=tmp_path, num_cpus=1, object_store_bytes=1, resources={})


@pytest.fixture
def stubborn(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[StubbornRay]:
    ray_that_fails = StubbornRay(request.param)
    monkeypatch.setattr(ray, "init", ray_that_fails.init)
    yield ray_that_fails
    for process in ray_that_fails.started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("stubborn", [1], indirect=True)
def test_processes_that_ray_did_not_start_outlive_it(home: PrivateRay, stubborn: StubbornRay) -> None:
    with subprocess.Popen(SLEEPER) as other:
        home.start()
        home.stop()

        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize("stubborn", [1], indirect=True)
def test_ray_that_missed_its_time_is_started_again_without_what_was_left(
    home: PrivateRay, stubborn: StubbornRay
) -> None:
    home.start()

    first, second = stubborn.started
    first.wait(60)
    assert second.poll() is None


@pytest.mark.parametrize("stubborn", [0], indirect=True)
def test_what_ended_by_itself_keeps_nothing_else_from_being_killed(home: PrivateRay, stubborn: StubbornRay) -> None:
    home.start()
    (process,) = stubborn.started
    with subprocess.Popen(SLEEPER) as other:
        ended = psutil.Process(other.pid)
        other.kill()
    listed = iter([[ended, psutil.Process(process.pid)], []])
    home._started = lambda: next(listed)  # type: ignore[assignment]

    home.kill()

    process.wait(60)


@pytest.mark.parametrize("stubborn", [2], indirect=True)
def test_ray_that_does_not_start_at_all_says_so(home: PrivateRay, stubborn: StubbornRay) -> None:
    with pytest.raises(RayUnavailableError, match="twice: The current node timed out during startup"):
        home.start()

    assert len(stubborn.started) == 2


def other_python() -> None:
    """Ray's error for a process with another Python than the cluster's."""
    check_version_info({"ray_version": ray.__version__, "python_version": "3.1.4"}, "node 10.0.0.10")


def no_node() -> None:
    """Ray's error on a machine that is not part of the cluster."""
    try:
        raise RuntimeError("No node info found matching attributes: '' when trying to resolve node to connect to.")
    except RuntimeError as error:
        raise ConnectionError("Failed to connect to Ray cluster at 10.0.0.10:6379") from error


def no_ray() -> None:
    """Ray's error on a machine without Ray."""
    raise ConnectionError("Could not find any running Ray instance. Please specify the one to connect to by ...")


def no_token() -> None:
    """A possible error of Ray if a token is missing."""
    raise ConnectionError("ray client connection timeout")


@pytest.mark.parametrize(
    ("says", "remedy"),
    [
        (other_python, r"Python: 3\.1\.4.*use the versions of Python and Ray of that cluster"),
        (no_node, r"No node info found.*this machine is not part of that cluster"),
        (no_ray, r"no Ray runs on this machine"),
        (no_token, r"RAY_AUTH_MODE is"),
    ],
)
def test_ray_that_cannot_be_used_is_named_with_the_remedy(
    says: Callable[[], None], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "init", lambda **options: says())

    with pytest.raises(RayUnavailableError) as refused:
        connect("10.0.0.10:6379")

    text = " ".join(str(refused.value).split())
    assert text.startswith("cannot use the Ray at 10.0.0.10:6379: ")
    assert re.search(remedy, text), text
    assert ("RAY_AUTH_MODE" in text) == (says is no_token)
