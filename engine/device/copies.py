"""Copies a step's arrays to the device, and its results back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[np.generic[Any]], device: torch.device) -> torch.Tensor:
    """An array as a tensor on ``device``: the same memory on the CPU, an asynchronous copy on a GPU."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def put(target: torch.Tensor, index: tuple[torch.Tensor, ...], value: float) -> None:
    """Write one number to many places. ``target[index] = value`` would make the host wait for the copy to the GPU."""
    target.index_put_(index, target.new_full((), value))


class Download:
    """Tensors on their way to the host: the same memory on a CPU; on a GPU, copies to pinned memory behind the step.

    When ``wait`` returns, the copies and everything launched before them are done.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = tensors
        if device.type != "cpu":
            self._tensors = [_pinned_copy(tensor) for tensor in tensors]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not say what it takes
            self._event.record()

    def wait(self) -> list[npt.NDArray[np.generic[Any]]]:
        """The tensors as arrays, in order."""
        if self._event is not None:
            self._event.synchronize()
        return [tensor.numpy() for tensor in self._tensors]


def _pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
