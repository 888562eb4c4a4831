"""The threads of a CPU's steps: one for each core that ``CoreShare`` gives, pinned while some are borrowed."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from engine.device.core_share import CoreShare
from engine.device.cores import run_anywhere, stay_on, usable_cores
from engine.kernels.thread_team import run_on_team
from engine.runner.cpu_threads import PLACED_BY_OTHERS


class SharedThreads:
    """Has torch, its matrix library and our kernels compute with as many threads as the share has cores.

    Implements ``StepThreads``.

    All of them ask the OpenMP runtime for the number of threads at every product. Switching between one thread and
    several is free, since the others just sleep. With borrowed cores each thread is pinned to its own core: otherwise
    the system may put two on one core, and each product would wait for them. Without borrowed cores the system places
    the threads.
    """

    def __init__(self, share: CoreShare) -> None:
        self._share = share
        self._num_threads = torch.get_num_threads()
        self._places = not any(name in os.environ for name in PLACED_BY_OTHERS)
        self._cores = share.own
        self._num_looks, self._num_seen = 0, 0

    @property
    def own(self) -> frozenset[int]:
        """The cores that belong to this engine, whatever other workers do."""
        return self._share.own

    @property
    def num_usable(self) -> int:
        """How many cores it computes on while no other worker of the host does."""
        return self._share.num_usable

    def begin_step(self) -> bool:
        """See ``StepThreads``."""
        self._num_looks = self._num_seen = 0
        self._follow(self._share.begin_step())
        return len(self._cores) > self._num_threads

    def between_layers(self) -> None:
        """Within a long step, give cores back to owners who began to compute, or borrow idle ones."""
        self._follow(self._share.look())

    @property
    def step_cores(self) -> float:
        """See ``StepThreads``."""
        return self._num_seen / (self._num_looks * max(len(self._share.own), 1)) if self._num_looks else 1.0

    def rest(self) -> None:
        """See ``StepThreads``."""
        self._share.rest()

    def close(self) -> None:
        """See ``StepThreads``."""
        self._share.close()

    def _follow(self, cores: frozenset[int]) -> None:
        self._num_looks += 1
        self._num_seen += len(cores)
        if cores == self._cores:
            return
        is_alone, was_alone = len(cores) <= self._num_threads, len(self._cores) <= self._num_threads
        self._cores = cores
        if is_alone and was_alone:
            return
        count = self._num_threads if is_alone else len(cores)
        torch.set_num_threads(count)
        if self._places:
            _place([] if is_alone else [*sorted(self._share.own), *sorted(cores - self._share.own)], count)


def share_cores(path: Path, *, borrows: bool) -> SharedThreads:
    """The threads of this process's engine. The workers of the host coordinate through the file ``path``.

    Call it from the thread that computes, after it has set its own number of threads.

    Raises:
        CoreTableError: They cannot meet there.
    """
    return SharedThreads(CoreShare(path, usable=usable_cores(), num_own=torch.get_num_threads(), borrows=borrows))


def _place(cores: list[int], num_threads: int) -> None:
    """Pin the threads of a team to ``cores``, the stepping thread to the first; if empty, unpin them."""

    def settle() -> None:
        if cores:
            stay_on(cores[_thread_number()])
        else:
            run_anywhere()

    if num_threads == 1 or not run_on_team(settle, num_threads):
        run_anywhere()


def _thread_number() -> int:
    """The number of this thread in its team; 0 is the thread that steps."""
    number: int = ctypes.CDLL(None).omp_get_thread_num()
    return number
