"""A mixture of experts beside an MLP that every token goes through.

Source: Dai et al., DeepSeekMoE, 2024.
"""

from __future__ import annotations

import torch

from engine.layers.mlp import FeedForward


class SharedExperts:
    """The sum of two parts, a ``FeedForward`` like each of them."""

    def __init__(self, mixture: FeedForward, shared: FeedForward) -> None:
        self._mixture, self._shared = mixture, shared

    def targets(self) -> dict[str, torch.Tensor]:
        """See ``FeedForward``."""
        return {**self._mixture.targets(), **self._shared.targets()}

    def pack(self) -> None:
        """See ``FeedForward``."""
        self._mixture.pack()
        self._shared.pack()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``FeedForward``."""
        return self._mixture(x).add_(self._shared(x))
