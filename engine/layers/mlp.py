"""The feed-forward part of a decoder layer, and its plain kind: an MLP with or without a gate."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.layers.activation import ActivationLayer
from engine.layers.fused_ops import FusedOps
from engine.layers.layer_spec import Activation, MLPNames
from engine.layers.linear import Linear


class FeedForward(Protocol):
    """The part of a decoder layer that treats each token separately."""

    def targets(self) -> dict[str, torch.Tensor]:
        """The destinations of a checkpoint's tensors, by name within the layer."""

    def pack(self) -> None:
        """Let the matrix library repack the loaded matrices."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] to the same shape."""


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
        names: MLPNames,
        dtype: torch.dtype,
        device: torch.device,
        fused_ops: FusedOps | None = None,
    ) -> None:
        self._names = names
        out_sizes = [inner_size] * (1 + is_gated)
        self._into = Linear(hidden_size, out_sizes, bias=bias, dtype=dtype, device=device)
        self._activate = ActivationLayer(
            activation, is_gated=is_gated, feeds_product=True, dtype=dtype, device=device, fused_ops=fused_ops
        )
        self._down = Linear(inner_size, [hidden_size], bias=bias, dtype=dtype, device=device)

    def targets(self) -> dict[str, torch.Tensor]:
        """See ``FeedForward``."""
        names = self._names
        return {
            **self._into.targets(names.into, is_transposed=names.is_transposed),
            **self._down.targets((names.down,), is_transposed=names.is_transposed),
        }

    def pack(self) -> None:
        """See ``FeedForward``."""
        self._into.pack()
        self._down.pack()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``FeedForward``."""
        return self._down(self._activate(self._into(x)))
