"""The threads of a CPU's steps: one a core that ``CoreShare`` gives, and each on its core while some are borrowed."""

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

    Implements ``StepThreads``, see there.

    All of them ask OpenMP's runtime for the number at every product. Between one thread and several it costs nothing to
    change: the others sleep meanwhile. With borrowed cores each thread is kept on a core of its own, for the system may
    move two to one core, and each product would wait for them; without, the system places threads as it did before.
    """

    def __init__(self, share: CoreShare) -> None:
        self._share = share
        self._num_threads = torch.get_num_threads()
        self._places = not any(name in os.environ for name in PLACED_BY_OTHERS)
        self._cores = share.own
        self._num_looks, self._num_seen = 0, 0

    @property
    def own(self) -> frozenset[int]:
        """The cores that are this engine's whoever else computes."""
        return self._share.own

    @property
    def num_usable(self) -> int:
        """On so many cores it computes while nobody else of the host does."""
        return self._share.num_usable

    def begin_step(self) -> bool:
        """See ``StepThreads``."""
        self._num_looks = self._num_seen = 0
        self._follow(self._share.begin_step())
        return len(self._cores) > self._num_threads

    def between_layers(self) -> None:
        """Give cores back to owners who began to compute, or take those of others, within a long step."""
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
    """The threads of this process's engine among those of the host's other workers, who meet at ``path``.

    To be called by the thread that computes, which has set how many threads are its own.

    Raises:
        CoreTableError: They cannot meet there.
    """
    return SharedThreads(CoreShare(path, usable=usable_cores(), num_own=torch.get_num_threads(), borrows=borrows))


def _place(cores: list[int], num_threads: int) -> None:
    """Keep the threads of a team on ``cores``, the one that steps on the first; anywhere if there are none."""

    def settle() -> None:
        if cores:
            stay_on(cores[_thread_number()])
        else:
            run_anywhere()

    if num_threads == 1 or not run_on_team(settle, num_threads):
        run_anywhere()


def _thread_number() -> int:
    """Of this thread in its team, from 0, which is the one that steps."""
    number: int = ctypes.CDLL(None).omp_get_thread_num()
    return number
