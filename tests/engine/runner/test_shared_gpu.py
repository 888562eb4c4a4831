"""Engines that share a GPU know whether the others compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.serve.workers import parts_of_gpu
from engine.device.core_share import LEND_AFTER_NS, CoreShare
from engine.runner.shared_gpu import SharedGPU


class Clock:
    """A clock in nanoseconds that tests advance."""

    now_ns = 1_000_000_000

    def __call__(self) -> int:
        """Now."""
        return self.now_ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_step_has_the_whole_gpu_while_the_others_have_nothing_to_compute(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "table"
    shares = [CoreShare(path, usable=range(3), num_own=1, borrows=True, clock_ns=clock) for _ in range(3)]
    first, second, third = map(SharedGPU, shares)

    clock.now_ns += LEND_AFTER_NS

    assert (first.begin_step(), first.step_cores, first.num_parts) == (True, 3.0, 3)
    second.begin_step()
    first.begin_step()
    assert first.step_cores + second.step_cores <= 3.0
    third.begin_step()
    for shared in (first, second, third):
        assert (shared.begin_step(), shared.step_cores) == (False, 1.0)
    second.rest()
    third.rest()
    clock.now_ns += LEND_AFTER_NS
    assert (first.begin_step(), first.step_cores) == (True, 3.0)

    for shared in (first, second, third):
        shared.close()


@pytest.mark.parametrize(("share", "num_parts"), [(1.0, 1), (2.0, 1), (0.0, 1), (0.5, 2), (0.3333, 3), (0.4, 2)])
def test_the_share_that_ray_gives_says_how_many_there_can_be(share: float, num_parts: int) -> None:
    assert parts_of_gpu(share) == num_parts
