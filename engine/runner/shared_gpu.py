"""How much of a shared GPU an engine has: the driver gives all of it to who computes while the others do not."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.device.core_share import CoreShare


class SharedGPU:
    """Notes it at each step, in parts of which every engine has one: routers are to know that steps are shorter alone.

    Implements ``StepThreads``, see there: parts are what cores are to a CPU, but that nobody has to do anything for it.
    """

    def __init__(self, share: CoreShare) -> None:
        self._share = share
        self._num_parts = 1

    @property
    def num_parts(self) -> int:
        """Of the whole GPU."""
        return self._share.num_usable

    def begin_step(self) -> bool:
        """See ``StepThreads``."""
        self._num_parts = len(self._share.begin_step())
        return self._num_parts > 1

    def between_layers(self) -> None:
        """See ``StepThreads``. The host launches layers long before they are computed: nothing to see here."""

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
    """One part of this process's GPU, whose engines meet at ``path``.

    Raises:
        CoreTableError: They cannot meet there.
    """
    return SharedGPU(CoreShare(path, usable=range(num_parts), num_own=1, borrows=True))


def gpu_id() -> str:
    """The GPU of this process, by a name that it has in every process."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
