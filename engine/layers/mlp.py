"""The MLP of a layer: with a gate or without one."""

from __future__ import annotations

import torch

from engine.layers.activation import ActivationLayer
from engine.layers.fused_ops import FusedOps
from engine.layers.layer_spec import Activation
from engine.layers.linear import Linear


class MLP:
    """Two matrix products with an activation between them, on [num_tokens, hidden_size]."""

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        *,
        activation: Activation,
        is_gated: bool,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        fused_ops: FusedOps | None = None,
    ) -> None:
        out_sizes = [inner_size] * (1 + is_gated)
        self.into = Linear(hidden_size, out_sizes, bias=bias, dtype=dtype, device=device)
        self.activate = ActivationLayer(activation, is_gated=is_gated, dtype=dtype, device=device, fused_ops=fused_ops)
        self.down = Linear(inner_size, [hidden_size], bias=bias, dtype=dtype, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """What the MLP makes of each token."""
        return self.down(self.activate(self.into(x)))
