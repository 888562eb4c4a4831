"""Tests on samples whether a module computes the same as one of our layers."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

TOLERANCE: Final = 2e-5
"""Relative to a row's largest number: several times the effect of another summation order, and far below the effect of
another activation."""

ROW_SCALES: Final = (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4)
"""Scales of the sample rows. Small rows reveal what is added to a variance, medium ones the curve of an activation, and
large ones the bounds of a clamp.
"""

NUM_ROWS: Final = len(ROW_SCALES)


def sample_rows(size: int, device: torch.device) -> torch.Tensor:
    """[NUM_ROWS, size] in float32, the same on every call."""
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(NUM_ROWS, size, generator=generator) * torch.tensor(ROW_SCALES)[:, None]
    return rows.to(device)


def agree(ours: torch.Tensor, theirs: Any) -> bool:
    """Whether both agree on each row (their first dimension)."""
    if not isinstance(theirs, torch.Tensor) or ours.shape != theirs.shape:
        return False
    allowed = TOLERANCE * theirs.abs().flatten(1).amax(dim=1)
    return bool(((ours - theirs).abs().flatten(1).amax(dim=1) <= allowed).all())


def call_in_float32(
    module: nn.Module, *args: Any, weights: dict[str, torch.Tensor] | None = None, **kwargs: Any
) -> Any:
    """What a module returns if its weights (or ``weights`` in their place) and all its arguments are float32."""
    own = {name: _widened(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    args, kwargs = pytree.tree_map(_copied, (args, kwargs))
    return torch.func.functional_call(module, own | (weights or {}), args, kwargs)


def in_float32(linear: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """A linear layer's product with float32 rows."""
    bias = None if linear.bias is None else linear.bias.float()
    return nn.functional.linear(rows, linear.weight.float(), bias)


def _copied(value: Any) -> Any:
    """A float32 copy, since the callee may write to it."""
    wide = _widened(value)
    return wide.clone() if isinstance(wide, torch.Tensor) else wide


def _widened(value: Any) -> Any:
    is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().float() if is_number else value
