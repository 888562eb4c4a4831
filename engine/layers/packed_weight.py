"""Matrix products with weights in the layout that the machine's matrix library likes best."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

Multiply = Callable[[torch.Tensor], torch.Tensor]


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
    """A function that multiplies by ``weight`` [out_size, in_size], transposed, and adds ``bias``."""
    return partial(F.linear, weight=weight, bias=bias)
