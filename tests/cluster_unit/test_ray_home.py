"""A private Ray that does not start at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from cluster.ray_home import PrivateRay, RayUnavailableError

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
def home(tmp_path: Path) -> PrivateRay:
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
def test_ray_that_missed_its_time_is_started_again_without_what_was_left(
    home: PrivateRay, stubborn: StubbornRay
) -> None:
    home.start()

    first, second = (process.pid for process in stubborn.started)
    alive = {process.pid for process in psutil.process_iter() if process.status() != psutil.STATUS_ZOMBIE}
    assert first not in alive
    assert second in alive


@pytest.mark.parametrize("stubborn", [2], indirect=True)
def test_ray_that_does_not_start_at_all_says_so(home: PrivateRay, stubborn: StubbornRay) -> None:
    with pytest.raises(RayUnavailableError, match="twice: The current node timed out during startup"):
        home.start()

    assert len(stubborn.started) == 2
