"""The check of a soak's memory: made-up series that are known to grow or not, and a real process that grows."""

from __future__ import annotations

import math
import mmap
import os
import random
from collections.abc import Callable

import pytest

from benchmarks.memory_watch import (
    MIB,
    PERIOD_S,
    MemoryWatch,
    Sample,
    WatchedProcess,
    growth_problems,
    keeps_growing,
    pss_bytes,
    quarters,
)


def made_up(size_mib: Callable[[float], float], *, seconds: float = 1800.0) -> list[Sample]:
    """Samples of a process of such a size, with some noise."""
    draw = random.Random(1)
    times = [PERIOD_S * index for index in range(int(seconds / PERIOD_S))]
    return [Sample(at_s=at_s, pss_bytes=int(MIB * (size_mib(at_s) + draw.uniform(-8, 8)))) for at_s in times]


@pytest.mark.parametrize(
    ("what", "size_mib"),
    [
        ("a leak of 6 MiB a minute", lambda s: 500 + s / 10),
        ("a leak that begins late", lambda s: 500 + max(s - 700, 0) / 5),
        ("a leak in steps", lambda s: 500 + 40 * (s // 240)),
        ("a leak under a saw", lambda s: 500 + s / 10 + s % 60),
    ],
)
def test_what_keeps_growing_is_found(what: str, size_mib: Callable[[float], float]) -> None:
    assert keeps_growing(made_up(size_mib)), what


@pytest.mark.parametrize(
    ("what", "size_mib"),
    [
        ("the same size", lambda _: 500),
        ("caches that fill", lambda s: 900 - 400 * math.exp(-s / 120)),
        ("one larger step", lambda s: 500 if s < 900 else 900),
        ("a saw", lambda s: 500 + 2 * (s % 300)),
        ("less and less", lambda s: 900 - s / 10),
        ("what stays below the bound", lambda s: 500 + s / 40),
    ],
)
def test_what_does_not_is_not(what: str, size_mib: Callable[[float], float]) -> None:
    assert not keeps_growing(made_up(size_mib)), what


@pytest.mark.parametrize("seconds", [0.0, 60.0, 359.0])
def test_short_lives_are_not_judged(seconds: float) -> None:
    samples = made_up(lambda s: 500 + 10 * s, seconds=seconds)

    assert quarters(samples) == []
    assert not keeps_growing(samples)


def test_problem_names_the_process_and_its_sizes() -> None:
    grows = WatchedProcess(role="prefill", pid=7, began_s=1.0)
    stays = WatchedProcess(role="prefill", pid=7, began_s=2.0)
    series = {grows: made_up(lambda s: 100 + s), stays: made_up(lambda _: 100)}

    (problem,) = growth_problems(series)

    assert problem.startswith("prefill (pid 7) keeps growing: ")
    assert "more than 64 MiB" in problem


def test_watch_sees_a_process_become_larger_and_forgets_nobody() -> None:
    watch = MemoryWatch(lambda: [("me", os.getpid()), ("gone", 2**22 + 1)])
    watch.look()
    with mmap.mmap(-1, 40 * MIB) as memory:
        memory.write(bytes(40 * MIB))
        watch.look()

    ((process, samples),) = watch.series.items()
    assert (process.role, process.pid) == ("me", os.getpid())
    assert samples[1].pss_bytes - samples[0].pss_bytes > 30 * MIB
    assert pss_bytes(os.getpid()) > 0


def test_watch_looks_until_it_is_stopped() -> None:
    def find() -> list[tuple[str, int]]:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the cluster does not answer")
        return [("me", os.getpid())]

    calls: list[int] = []
    with MemoryWatch(find, period_s=0.001) as watch:
        while not watch.series or len(next(iter(watch.series.values()))) < 3:
            pass

    assert len(calls) >= 4
