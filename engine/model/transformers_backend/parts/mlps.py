"""Our replacement of MLPs: two products with one of our activations between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from engine.layers.activation import ActivationLayer
from engine.layers.fused_ops import activate_halves, activate_plain
from engine.layers.layer_spec import Activation
from engine.model.transformers_backend.linears import pack_joined
from engine.model.transformers_backend.parts.agreement import agree, call_in_float32, in_float32, sample_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPParts:
    """What an MLP consists of. into: one layer; or two if it is gated, the gate's first."""

    into: Sequence[nn.Linear]
    down: nn.Linear
    activation: Activation
    is_gated: bool


class OwnMLP(nn.Module):
    """Replaces an MLP of a model."""

    def __init__(self, parts: MLPParts) -> None:
        super().__init__()
        weight = parts.down.weight
        self._into, self._down = pack_joined(parts.into), pack_joined([parts.down])
        self._activate = ActivationLayer(
            parts.activation, is_gated=parts.is_gated, feeds_product=True, dtype=weight.dtype, device=weight.device
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] to the same shape."""
        return self.rows(x.reshape(-1, x.shape[-1])).view(x.shape)

    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] to the same shape."""
        return self._down(self._activate(self._into(rows)))


def find_mlp(module: nn.Module) -> MLPParts | None:
    """The parts of a module, if it is an MLP that we can compute."""
    linears = [child for child in module.children() if type(child) is nn.Linear]
    num_weights = sum(weight.numel() for weight in module.parameters())
    if num_weights != sum(weight.numel() for linear in linears for weight in linear.parameters()):
        return None
    for parts in _candidates(linears):
        rows = sample_rows(parts.down.out_features, parts.down.weight.device)
        try:
            theirs = call_in_float32(module, rows.unsqueeze(0))[0]
        except Exception:  # some other module, which must be called differently
            continue
        if agree(_compute(parts, rows), theirs):
            return parts
    return None


def _candidates(linears: Sequence[nn.Linear]) -> Iterator[MLPParts]:
    """What a module with these linear layers may be, judging by their sizes."""
    for down in linears:
        others = [linear for linear in linears if linear is not down]
        if not others or any(linear.in_features != down.out_features for linear in others):
            continue
        width = sum(linear.out_features for linear in others)
        for activation in Activation:
            if width == down.in_features and len(others) == 1:
                yield MLPParts(into=others, down=down, activation=activation, is_gated=False)
            if width == 2 * down.in_features and len({linear.out_features for linear in others}) == 1:
                for into in (others, others[::-1])[: len(others)]:
                    yield MLPParts(into=into, down=down, activation=activation, is_gated=True)


def _compute(parts: MLPParts, rows: torch.Tensor) -> torch.Tensor:
    inner = torch.cat([in_float32(linear, rows) for linear in parts.into], dim=1)
    bend = activate_halves if parts.is_gated else activate_plain
    return in_float32(parts.down, bend(inner, parts.activation))
