"""One layer of a model as attention backends see it, and what happens to its heads before they attend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.layers.attention_spec import AttentionSpec
from engine.layers.fused_ops import FusedOps
from engine.layers.norm import RMSNorm
from engine.layers.rotary import Rotations, rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTransform:
    """One layer's heads; the norms are None in models without them. ``fused_ops``, if there are any, normalise heads by
    the norm of the model's ``FusedSpec``, which is that of ``query_norm`` and ``key_norm``.
    """

    num_heads: int
    num_kv_heads: int
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    fused_ops: FusedOps | None = None

    def __call__(self, heads: torch.Tensor, rotations: Rotations) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value of [num_tokens, num_heads + 2 * num_kv_heads, head_dim], as attention takes them."""
        query, key, value = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return rotate(query, rotations), rotate(key, rotations), value

    def place(
        self,
        heads: torch.Tensor,
        rotations: Rotations,
        cache: tuple[torch.Tensor, torch.Tensor],
        places: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """The same, but that keys and values go to the cache: ``FusedOps.place_heads``, which there must be."""
        assert self.fused_ops is not None
        norms = None
        if self.query_norm is not None and self.key_norm is not None:
            norms = self.query_norm.weight, self.key_norm.weight
        return self.fused_ops.place_heads(heads, (self.num_heads, self.num_kv_heads), norms, rotations, cache, places)


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
