"""The experts function that a model's own code calls: tokens grouped by expert, and Baton's own products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.layers.experts.products import ExpertProducts, pack_experts

IMPLEMENTATION: Final = "baton_grouped"
"""Its name in transformers."""

PACKED_EXPERTS: Final = "baton_packed_experts"
"""The attribute of a module of experts that holds its ``PackedExperts``."""


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The products of one layer's experts."""

    into: ExpertProducts
    down: ExpertProducts


def grouped_experts(
    module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """Send tokens through their experts. Has the signature of an experts function in transformers.

    hidden: [num_tokens, hidden_size]; chosen, weights: [num_tokens, num_active] experts and the factors of their
        results. A token's result does not depend on other tokens.
    """
    if hidden.device.type == "meta":
        return torch.empty_like(hidden)
    packed: PackedExperts = getattr(module, PACKED_EXPERTS)
    num_active = chosen.shape[1]
    experts, order = chosen.flatten().sort(stable=True)
    rows = hidden.index_select(0, order.div(num_active, rounding_mode="floor"))
    inner = packed.into(rows, experts)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outputs = packed.down(inner.contiguous(), experts)
    if module.has_post_expert_norm:
        outputs = module.post_expert_norm(outputs)
    by_token = torch.empty_like(outputs).index_copy_(0, order, outputs).view(len(hidden), num_active, -1)
    weights = weights.to(outputs.dtype)
    total = by_token[:, 0] * weights[:, :1]
    for rank in range(1, num_active):
        total += by_token[:, rank] * weights[:, rank : rank + 1]
    return total.to(hidden.dtype)


def pack_all_experts(model: nn.Module) -> None:
    """Let the matrix library repack the matrices of all modules of experts; they are not readable afterwards."""
    for module in model.modules():
        if hasattr(module, "down_proj") and hasattr(module, "has_post_expert_norm"):
            into = "gate_up_proj" if module.has_gate else "up_proj"
            setattr(module, PACKED_EXPERTS, PackedExperts(_pack(module, into), _pack(module, "down_proj")))


def _pack(module: Any, name: str) -> ExpertProducts:
    """The products with one parameter of a module, [num_experts, out_size, in_size], or with the last two swapped."""
    weight: torch.Tensor = getattr(module, name).data
    bias = getattr(module, f"{name}_bias").data if module.has_bias else None
    packed = pack_experts(weight.transpose(1, 2).contiguous() if module.is_transposed else weight, bias)
    setattr(module, name, None)
    return packed


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, grouped_experts)
