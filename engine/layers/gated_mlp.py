"""The part of a decoder layer behind attention, and its plain kind: an MLP with a gate."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.layers.fused_ops import FusedOps
from engine.layers.gated_silu import GatedSiLU
from engine.layers.linear import Linear


class FeedForward(Protocol):
    """What a decoder layer does with each token by itself."""

    def targets(self) -> dict[str, torch.Tensor]:
        """Where the tensors of a checkpoint go, by their names within the layer."""

    def pack(self) -> None:
        """Hand the loaded matrices to the matrix library."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] to as much."""


class GatedMLP:
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        fused_ops: FusedOps | None,
    ) -> None:
        self._gate_up = Linear(hidden_size, (inner_size, inner_size), bias=bias, dtype=dtype, device=device)
        self._gate = GatedSiLU(dtype=dtype, device=device, fused_ops=fused_ops)
        self._down = Linear(inner_size, (hidden_size,), bias=bias, dtype=dtype, device=device)

    def targets(self) -> dict[str, torch.Tensor]:
        """See ``FeedForward``."""
        return {
            **self._gate_up.targets(("mlp.gate_proj", "mlp.up_proj")),
            **self._down.targets(("mlp.down_proj",)),
        }

    def pack(self) -> None:
        """See ``FeedForward``."""
        self._gate_up.pack()
        self._down.pack()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``FeedForward``."""
        return self._down(self._gate(self._gate_up(x)))
