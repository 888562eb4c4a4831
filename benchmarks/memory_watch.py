"""The memory of a cluster's processes over time, and whether one of them keeps growing."""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

MIB = 1 << 20
MAX_GROWTH_BYTES = 64 * MIB
"""How much larger a process may be in the last quarter of its time than in the second, if it also grew in between."""

SETTLE_S = 120.0
"""This first part of a process's time is not judged, because a new process fills its caches."""

MIN_JUDGED_S = 240.0
"""Processes that live for less time are not judged."""

PERIOD_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The proportional set size of a process at a time."""

    at_s: float
    pss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedProcess:
    """One life of one process; ``began_s`` distinguishes it from another process with the same id."""

    role: str
    pid: int
    began_s: float

    def __str__(self) -> str:
        return f"{self.role} (pid {self.pid})"


def quarters(samples: Sequence[Sample]) -> list[float]:
    """The median size in each quarter of the judged time; empty if there are too few samples."""
    if not samples:
        return []
    begin_s = samples[0].at_s + SETTLE_S
    length_s = samples[-1].at_s - begin_s
    if length_s < MIN_JUDGED_S:
        return []
    parts: list[list[int]] = [[], [], [], []]
    for sample in samples:
        if sample.at_s >= begin_s:
            parts[min(int(4 * (sample.at_s - begin_s) / length_s), 3)].append(sample.pss_bytes)
    return [statistics.median(part) for part in parts] if all(parts) else []


def keeps_growing(samples: Sequence[Sample], *, max_growth_bytes: int = MAX_GROWTH_BYTES) -> bool:
    """True if a process grew by more than the limit from the second to the last quarter of its time, and by at least a
    quarter of the limit in each of the two steps.

    So a process that once became larger and stayed so does not count, nor one that grows and shrinks.
    """
    sizes = quarters(samples)
    if not sizes:
        return False
    _, second, third, fourth = sizes
    least = max_growth_bytes / 4
    return fourth - second > max_growth_bytes and third - second > least and fourth - third > least


def growth_problems(series: Mapping[WatchedProcess, Sequence[Sample]]) -> list[str]:
    """A sentence for each process that keeps growing."""
    problems: list[str] = []
    for process, samples in series.items():
        if keeps_growing(samples):
            told = ", ".join(f"{size / MIB:.0f}" for size in quarters(samples))
            problems.append(
                f"{process} keeps growing: {told} MiB in the quarters of its run, which is more than "
                f"{MAX_GROWTH_BYTES // MIB} MiB from the second to the last"
            )
    return problems


def pss_bytes(pid: int) -> int:
    """The memory of a process, including its share of memory that it shares with others.

    Raises:
        OSError: It is gone.
    """
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)


def proxies_of(address: str) -> list[tuple[str, int]]:
    """The HTTP proxies of the Ray at this address: Serve's, and HAProxy."""
    found: list[tuple[str, int]] = []
    for process in psutil.process_iter(["name", "cmdline"]):
        with suppress(psutil.Error):
            words = " ".join(process.info["cmdline"] or ())
            is_proxy = words.startswith("ray::ProxyActor") or process.info["name"] == "haproxy"
            if is_proxy and any(address in " ".join(parent.cmdline()) for parent in process.parents()):
                found.append(("proxy", process.pid))
    return found


class MemoryWatch:
    """Samples processes in a thread of its own, every few seconds, until it is stopped."""

    def __init__(self, find: Callable[[], Iterable[tuple[str, int]]], *, period_s: float = PERIOD_S) -> None:
        """``find`` returns roles and process ids; if it raises, there is no sample."""
        self._find = find
        self._period_s = period_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, name="memory-watch")
        self._lock = threading.Lock()
        self._series: defaultdict[WatchedProcess, list[Sample]] = defaultdict(list)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def series(self) -> dict[WatchedProcess, list[Sample]]:
        """All samples so far, oldest first."""
        with self._lock:
            return {process: list(samples) for process, samples in self._series.items()}

    def look(self) -> None:
        """Take one sample of all processes."""
        for role, pid in self._find():
            with suppress(OSError, psutil.Error):
                process = WatchedProcess(role=role, pid=pid, began_s=psutil.Process(pid).create_time())
                sample = Sample(at_s=time.monotonic(), pss_bytes=pss_bytes(pid))
                with self._lock:
                    self._series[process].append(sample)

    def _keep_looking(self) -> None:
        while not self._is_over.wait(self._period_s):
            with suppress(Exception):  # a cluster that is being broken does not always say who is there
                self.look()
