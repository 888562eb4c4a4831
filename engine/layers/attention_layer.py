"""One layer of a model as attention backends see it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.layers.attention_spec import AttentionSpec
from engine.layers.heads import HeadTransform


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """Where a layer's keys and values are, and how it attends to them.

    group: its KV cache group. index: its place among the layers of the group, which is its place in a block.
    transform: what happens to the heads of its fused projection before.
    sinks: [num_heads] float32, the scores of its sinks, where ``spec.has_sinks``.
    """

    group: int
    index: int
    spec: AttentionSpec
    transform: HeadTransform
    sinks: torch.Tensor | None = None
