"""Linear layers whose output is several projections side by side (fused query-key-value, fused gate-up)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.layers.packed_weight import Multiply, pack


class Linear:
    """``x @ weight.T + bias`` for one or several projections of the same input.

    The weight is [sum(out_sizes), in_size]; ``parts`` are the rows of each projection, which loading fills. After
    loading, ``pack`` lets the matrix library keep the weight in its own layout.
    """

    def __init__(
        self, in_size: int, out_sizes: Sequence[int], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty(sum(out_sizes), in_size, dtype=dtype, device=device)
        self.bias = torch.empty(sum(out_sizes), dtype=dtype, device=device) if bias else None
        self.out_sizes = list(out_sizes)
        self._multiply: Multiply | None = None

    def targets(self, names: Sequence[str], *, is_transposed: bool = False) -> dict[str, torch.Tensor]:
        """Where the projections called ``names`` are loaded: ``<name>.weight`` and, with a bias, ``<name>.bias``.

        One name for several projections means that the checkpoint stores them side by side too. ``is_transposed``: it
        stores the weight as [in_size, out_size].
        """
        sizes = self.out_sizes if len(names) > 1 else [sum(self.out_sizes)]
        weights = torch.split(self.weight, sizes)
        places = {
            f"{name}.weight": weight.t() if is_transposed else weight
            for name, weight in zip(names, weights, strict=True)
        }
        if self.bias is not None:
            parts = torch.split(self.bias, sizes)
            places.update({f"{name}.bias": part for name, part in zip(names, parts, strict=True)})
        return places

    def pack(self) -> None:
        """Let the matrix library repack the weight, which is not readable afterwards."""
        self._multiply = pack(self.weight, self.bias)
        self.weight = torch.empty(0, dtype=self.weight.dtype, device=self.weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply: [num_tokens, in_size] to [num_tokens, sum(out_sizes)]."""
        assert self._multiply is not None, "pack() comes after loading"
        return self._multiply(x)
