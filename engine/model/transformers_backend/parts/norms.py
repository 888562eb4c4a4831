"""Our replacement of norms: RMS norms, which take six operators in transformers, and torch's layer norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.layers.fused_ops import root_mean_square_norm
from engine.layers.layer_spec import NormKind, NormSpec
from engine.layers.norm import LayerNorm, Norm, build_norm
from engine.model.transformers_backend.parts.agreement import agree, call_in_float32, sample_rows


@dataclass(frozen=True, slots=True)
class FoundNorm:
    """A norm that we can compute. bias: of a layer norm."""

    spec: NormSpec
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def build(self, *, delta_scale: float = 1.0, dtype: torch.dtype | None = None) -> Norm:
        """Our norm, in the model's dtype or another one; ``delta_scale`` as in ``build_norm``."""
        weight, bias = self.weight, self.bias
        norm = build_norm(
            self.spec, len(weight), dtype=dtype or weight.dtype, device=weight.device, delta_scale=delta_scale
        )
        norm.weight.copy_(weight)
        if isinstance(norm, LayerNorm) and bias is not None:
            norm.bias.copy_(bias)
        return norm


class OwnNorm(nn.Module):
    """Replaces a norm of a model whose input had the norm's own dtype."""

    def __init__(self, found: FoundNorm) -> None:
        super().__init__()
        self._norm = found.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._norm.add_and_normalize(rows, None).view(x.shape)


def find_norm(module: nn.Module) -> FoundNorm | None:
    """The norm that a module computes, if it is one of ours."""
    if type(module) is nn.LayerNorm:
        spec = NormSpec(kind=NormKind.LAYER, eps=module.eps)
        is_ours = module.weight is not None and module.bias is not None and module.weight.dim() == 1
        return FoundNorm(spec, module.weight.data, module.bias.data) if is_ours else None
    weights = list(module.named_parameters())
    if len(weights) != 1 or weights[0][1].dim() != 1 or any(True for _ in module.children()):
        return None
    (name, weight), device = weights[0], weights[0][1].device
    rows, other = sample_rows(len(weight), device), torch.linspace(0.5, 1.5, len(weight), device=device)
    try:
        theirs = call_in_float32(module, rows, weights={name: other})
    except Exception:  # some other module, which must be called differently
        return None
    for spec in _specs(module):
        if agree(root_mean_square_norm(rows, other, spec), theirs):
            return FoundNorm(spec, weight.data)
    return None


def _specs(module: Any) -> Iterator[NormSpec]:
    """RMS norms that a module may be: tries each of its numbers as the epsilon."""
    small = {value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1}
    for eps in sorted(small):
        for offset in (0.0, 1.0):
            yield NormSpec(eps=eps, offset=offset)
