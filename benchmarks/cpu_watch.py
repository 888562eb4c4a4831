"""CPU time of a server and all processes that it starts, by process; an engine's threads are counted separately.

What belongs to a server carries a variable in its environment: daemons that left the process tree are found as well.
Threads are told apart by the name that the system knows them by (``engine.frontend.os_threads``). Linux only.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "BATON_BENCHMARK_SERVER"
"""Set in a server's environment; its children inherit it."""

ENGINE_THREADS = "engine threads"
"""The row for the compute threads: an engine's thread, and the team that it computes with."""

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_NAMES = {
    "ray::ServeReplica:baton:": "",
    "ray::": "",
    "VLLM::": "vllm ",
}
_UTIME, _STIME = 11, 12


@dataclass(frozen=True, slots=True)
class ThreadUse:
    """CPU seconds of a thread so far, and how often it went to sleep (voluntary context switches)."""

    cpu_s: float
    num_sleeps: int


class CpuWatch:
    """Measures the processes that have ``mark`` in their environment."""

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def take(self) -> dict[str, float]:
        """CPU seconds of each process so far, by name; those of an engine's threads are under ``ENGINE_THREADS``."""
        seconds: dict[str, float] = defaultdict(float)
        for process in self.processes():
            try:
                name = _plain_name(process)
                for thread, thread_s in _thread_seconds(process.pid):
                    seconds[ENGINE_THREADS if thread.startswith("engine ") else name] += thread_s
            except (psutil.Error, FileNotFoundError, ProcessLookupError):
                continue
        return seconds

    def take_engine(self, role: str) -> dict[int, ThreadUse]:
        """What each compute thread of a role's workers has used so far, by the thread's id."""
        used = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error, FileNotFoundError, ProcessLookupError):
                for task in Path(f"/proc/{process.pid}/task").iterdir():
                    if (task / "comm").read_text().strip() == f"engine {role}":
                        used[int(task.name)] = _use_of(task)
        return used

    def processes(self) -> set[psutil.Process]:
        """All processes of the server. Children count too, because a title may have overwritten a process's
        environment.
        """
        found: set[psutil.Process] = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, FileNotFoundError, ProcessLookupError):
                if process.environ().get(MARK) == self._mark:
                    found |= {process, *process.children(recursive=True)}
        return found


def spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """CPU seconds between two measurements, by process, highest first."""
    seconds = {name: total - before.get(name, 0.0) for name, total in after.items()}
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _use_of(task: Path) -> ThreadUse:
    fields = (task / "stat").read_text().rpartition(")")[2].split()
    status = (task / "status").read_text()
    num_sleeps = int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return ThreadUse((int(fields[_UTIME]) + int(fields[_STIME])) * _TICK_S, num_sleeps)


def _plain_name(process: psutil.Process) -> str:
    """A process's title, without parts that only say how it was started."""
    title = (process.cmdline() or [process.name()])[0]
    for prefix, plain in _NAMES.items():
        if title.startswith(prefix):
            return plain + title[len(prefix) :].split(" ")[0].split(".")[0]
    return Path(title.split(" ")[0]).name


def _thread_seconds(pid: int) -> list[tuple[str, float]]:
    """Name and CPU seconds of each thread."""
    threads = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            head, _, numbers = (task / "stat").read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = numbers.split()
        threads.append((head.partition("(")[2], (int(fields[_UTIME]) + int(fields[_STIME])) * _TICK_S))
    return threads
