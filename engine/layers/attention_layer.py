"""One layer of a model as attention backends see it, and how its heads are prepared before they attend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.layers.attention_spec import AttentionSpec
from engine.layers.fused_ops import FusedOps
from engine.layers.norm import RMSNorm
from engine.layers.rotary import Rotations, rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTransform:
    """Norms and rotation of one layer's heads. The norms are None in models without them. ``fused_ops``, if given,
    normalise heads by the model's ``FusedSpec``, the same norm as ``query_norm`` and ``key_norm``.
    """

    num_heads: int
    num_kv_heads: int
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    fused_ops: FusedOps | None = None

    def __call__(self, heads: torch.Tensor, rotations: Rotations) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value of [num_tokens, num_heads + 2 * num_kv_heads, head_dim], normalised and rotated."""
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
        """The same, but writes keys and values to the cache. Needs ``fused_ops`` (``FusedOps.place_heads``)."""
        assert self.fused_ops is not None
        norms = None
        if self.query_norm is not None and self.key_norm is not None:
            norms = self.query_norm.weight, self.key_norm.weight
        return self.fused_ops.place_heads(heads, (self.num_heads, self.num_kv_heads), norms, rotations, cache, places)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """Where a layer's keys and values are, and how it attends to them.

    group: its KV cache group. index: its index among the layers of the group, and so within a block.
    transform: prepares the heads of its fused projection.
    sinks: [num_heads] float32, the scores of its sinks, where ``spec.has_sinks``.
    """

    group: int
    index: int
    spec: AttentionSpec
    transform: HeadTransform
    sinks: torch.Tensor | None = None
