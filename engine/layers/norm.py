"""Root-mean-square normalisation.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


class RMSNorm:
    """Scales vectors to unit root mean square, then by a learnt weight; computed in float32 at least."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)
