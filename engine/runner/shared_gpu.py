"""How much of a shared GPU an engine gets: the driver gives an engine the whole GPU while the others are idle."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.device.core_share import CoreShare


class SharedGPU:
    """Counts, at each step, how many parts of the GPU this engine has. Every engine owns one part.

    Routers need this number: steps are shorter while the other engines are idle.
    Implements ``StepThreads``. A part is to a GPU what a core is to a CPU, but the driver assigns it without our help.
    """

    def __init__(self, share: CoreShare) -> None:
        self._share = share
        self._num_parts = 1

    @property
    def num_parts(self) -> int:
        """Parts that the whole GPU has."""
        return self._share.num_usable

    def begin_step(self) -> bool:
        """See ``StepThreads``."""
        self._num_parts = len(self._share.begin_step())
        return self._num_parts > 1

    def between_layers(self) -> None:
        """See ``StepThreads``. Does nothing: the host launches layers long before they are computed."""

    @property
    def step_cores(self) -> float:
        """See ``StepThreads``."""
        return float(self._num_parts)

    def rest(self) -> None:
        """See ``StepThreads``."""
        self._share.rest()

    def close(self) -> None:
        """See ``StepThreads``."""
        self._share.close()


def share_gpu(path: Path, *, num_parts: int) -> SharedGPU:
    """One part of this process's GPU. Engines that share the GPU meet in the file ``path``.

    Raises:
        CoreTableError: They cannot meet there.
    """
    return SharedGPU(CoreShare(path, usable=range(num_parts), num_own=1, borrows=True))


def gpu_id() -> str:
    """An id of this process's GPU that is the same in every process."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
