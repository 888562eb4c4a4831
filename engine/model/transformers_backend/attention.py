"""The attention function that a model's own code calls: paged attention over the current step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from transformers import AttentionInterface

from engine.attention.backend import AttentionPlans
from engine.layers.attention_layer import AttentionLayer
from engine.layers.rotary import Rotations, RotationTable

IMPLEMENTATION: Final = "baton_paged"
"""Its name in transformers. No mask function is registered under it, so models build no masks. What their masks would
say was found beforehand (``probe.py``) and is in each layer's ``AttentionSpec``."""


@dataclass(slots=True)
class CurrentStep:
    """The step that a model is computing; shared by all its layers.

    rotations: by table, for layers that do not use the rotations of the model's own code.
    """

    plans: AttentionPlans = ()
    rotations: Mapping[RotationTable, Rotations] = field(default_factory=dict)
    between_layers: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """What an attention module needs to attend."""

    step: CurrentStep
    layer: AttentionLayer


PAGED_LAYER: Final = "baton_paged_layer"
"""The attribute of an attention module that holds its ``PagedLayer``."""


def paged_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Attend with the engine's backend. Has the signature of an attention function in transformers.

    query: [1, num_heads, num_tokens, head_dim], rotated; key, value: [1, num_kv_heads, num_tokens, head_dim].

    Returns:
        [1, num_tokens, num_heads, head_dim], and no weights.
    """
    paged: PagedLayer = getattr(module, PAGED_LAYER)
    if paged.step.between_layers is not None:
        paged.step.between_layers()
    plan = paged.step.plans[paged.layer.group]
    attended = plan.attend(
        paged.layer,
        query[0].transpose(0, 1).contiguous(),
        key[0].transpose(0, 1).contiguous(),
        value[0].transpose(0, 1).contiguous(),
    )
    return attended.view(1, query.shape[2], query.shape[1], -1), None


AttentionInterface.register(IMPLEMENTATION, paged_attention)
