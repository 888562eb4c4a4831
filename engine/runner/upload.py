"""Carries a step's arrays to where the model computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[np.generic[Any]], device: torch.device) -> torch.Tensor:
    """An array as a tensor on ``device``: the same memory on the CPU, a copy that nobody waits for on a GPU."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
