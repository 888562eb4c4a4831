"""What a model's own code calls for attention: paged attention over the step that is being computed."""

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
"""Its name in transformers. No mask is registered under it, so that models build none: what their masks would say was
looked at before (``probe.py``) and is in each layer's ``AttentionSpec``."""


@dataclass(slots=True)
class CurrentStep:
    """The step that a model computes. One for all layers of a model.

    rotations: by their table, for layers that do not take what the model's own code makes of positions.
    """

    plans: AttentionPlans = ()
    rotations: Mapping[RotationTable, Rotations] = field(default_factory=dict)
    between_layers: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """What an attention module of a model must know to attend."""

    step: CurrentStep
    layer: AttentionLayer


PAGED_LAYER: Final = "baton_paged_layer"
"""The attribute of an attention module that holds its ``PagedLayer``."""


def paged_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Attend by the backend of the engine; an attention function as transformers calls it.

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
