"""Our replacement of attention modules: one product for queries, keys and values; norms and rotation are left to the
attention backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.layers.attention_layer import AttentionLayer
from engine.layers.norm import LayerNorm, RMSNorm
from engine.layers.rotary import RotationTable
from engine.model.transformers_backend.attention import CurrentStep
from engine.model.transformers_backend.linears import pack_joined
from engine.model.transformers_backend.parts.norms import FoundNorm


class Way(NamedTuple):
    """How heads are computed from a projection. is_by_head: the norm is over each head, not over all of them."""

    norm: FoundNorm | None = None
    is_by_head: bool = False
    is_rotated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParts:
    """What an attention module consists of.

    into: layers whose results side by side are queries, keys and values. query_way, key_way: may differ only in the
        weights of their norms. returns_pair: it returns a pair, with None in place of attention weights.
    """

    into: Sequence[nn.Linear]
    out: nn.Linear
    query_way: Way
    key_way: Way
    table: RotationTable
    returns_pair: bool


class OwnAttention(nn.Module):
    """Replaces an attention module of a model."""

    def __init__(self, parts: AttentionParts, layer: AttentionLayer, step: CurrentStep) -> None:
        super().__init__()
        self._into, self._out = pack_joined(parts.into), pack_joined([parts.out])
        self._table, self._returns_pair, self._step = parts.table, parts.returns_pair, step
        self._head_dim = parts.out.in_features // layer.transform.num_heads
        self._wide_norms: list[tuple[slice, RMSNorm]] = []
        query_norm, key_norm = _build(parts.query_way), _build(parts.key_way)
        if query_norm is not None and key_norm is not None and not parts.query_way.is_by_head:
            end = len(query_norm.weight)
            self._wide_norms = [(slice(end), query_norm), (slice(end, end + len(key_norm.weight)), key_norm)]
            query_norm = key_norm = None
        self._layer = replace(layer, transform=replace(layer.transform, query_norm=query_norm, key_norm=key_norm))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """[1, num_tokens, hidden_size] to the same shape; other arguments are ignored, since they add nothing."""
        hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        output = self.attend(hidden[0]).unsqueeze(0)
        return (output, None) if self._returns_pair else output

    def attend(self, read: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] to the same shape."""
        step, layer = self._step, self._layer
        if step.between_layers is not None:
            step.between_layers()
        projected = self._into(read)
        for columns, norm in self._wide_norms:
            norm.normalize_in_place(projected[:, columns])
        heads = projected.view(len(projected), -1, self._head_dim)
        return self._out(step.plans[layer.group].attend_heads(layer, heads, step.rotations[self._table]))


def _build(way: Way) -> RMSNorm | None:
    norm = None if way.norm is None else way.norm.build()
    assert not isinstance(norm, LayerNorm), "queries and keys are looked for behind norms of the other kind"
    return norm
