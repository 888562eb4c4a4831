"""Attention of a decoder layer between two products: into queries, keys and values, and out of the heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.layers.attention_layer import AttentionLayer, HeadTransform
from engine.layers.fused_ops import FusedOps
from engine.layers.layer_spec import QueryKeyNorm
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.rotary import Rotations
from engine.model.model_config import ModelConfig
from engine.model.step_context import StepContext


class Attention(Protocol):
    """The part of a decoder layer in which tokens see each other."""

    def targets(self) -> dict[str, torch.Tensor]:
        """The destinations of a checkpoint's tensors, by name within the layer."""

    def pack(self) -> None:
        """Let the matrix library repack the loaded matrices."""

    def __call__(self, read: torch.Tensor, rotations: Sequence[Rotations], context: StepContext) -> torch.Tensor:
        """[num_tokens, hidden_size] to the same shape; ``rotations`` match ``ModelConfig.ropes``."""


class SelfAttention:
    """Each token has a query for every head, and a key and a value for every key-value head."""

    def __init__(
        self, config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device, fused_ops: FusedOps | None
    ) -> None:
        self._names = config.names
        self._rope = config.ropes.index(config.attention[index].rope)
        self._head_dim = config.head_dim
        sizes = [config.q_size, config.kv_size, config.kv_size]
        self._qkv = Linear(config.hidden_size, sizes, bias=config.qkv_bias, dtype=dtype, device=device)
        self._projection_norms = _query_key_norms(config, QueryKeyNorm.PROJECTION, dtype, device)
        head_norms = _query_key_norms(config, QueryKeyNorm.HEAD, dtype, device)
        transform = HeadTransform(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            query_norm=head_norms[0] if head_norms else None,
            key_norm=head_norms[1] if head_norms else None,
            fused_ops=fused_ops,
        )
        self._layer = attention_layer(config, index, transform, device)
        self._o = Linear(config.q_size, [config.hidden_size], bias=config.o_bias, dtype=dtype, device=device)

    def targets(self) -> dict[str, torch.Tensor]:
        """See ``Attention``."""
        names, transform = self._names, self._layer.transform
        places: dict[str, torch.Tensor] = {}
        for linear, of_linear in ((self._qkv, names.qkv), (self._o, (names.o,))):
            places.update(linear.targets(of_linear, is_transposed=names.is_transposed))
        query_norm, key_norm = self._projection_norms or (transform.query_norm, transform.key_norm)
        for name, norm in ((names.query_norm, query_norm), (names.key_norm, key_norm)):
            if norm is not None:
                places.update(norm.targets(name))
        if self._layer.sinks is not None:
            places["self_attn.sinks"] = self._layer.sinks
        return places

    def pack(self) -> None:
        """See ``Attention``."""
        self._qkv.pack()
        self._o.pack()

    def __call__(self, read: torch.Tensor, rotations: Sequence[Rotations], context: StepContext) -> torch.Tensor:
        """See ``Attention``."""
        layer, projected = self._layer, self._qkv(read)
        if self._projection_norms is not None:
            query, key, _ = torch.split(projected, self._qkv.out_sizes, dim=1)
            for norm, part in zip(self._projection_norms, (query, key), strict=True):
                norm.normalize_in_place(part)
        heads = projected.view(read.shape[0], -1, self._head_dim)
        return self._o(context.plans[layer.group].attend_heads(layer, heads, rotations[self._rope]))


def _query_key_norms(
    config: ModelConfig, kind: QueryKeyNorm, dtype: torch.dtype, device: torch.device
) -> tuple[RMSNorm, RMSNorm] | None:
    """The norms of queries and keys, if the model has norms of this kind."""
    if config.qk_norm is not kind:
        return None
    is_head = kind is QueryKeyNorm.HEAD
    sizes = (config.head_dim, config.head_dim) if is_head else (config.q_size, config.kv_size)
    query_norm, key_norm = (RMSNorm(size, spec=config.norm, dtype=dtype, device=device) for size in sizes)
    return query_norm, key_norm


def attention_layer(config: ModelConfig, index: int, transform: HeadTransform, device: torch.device) -> AttentionLayer:
    """A layer of a model as attention backends see it."""
    spec = config.attention[index]
    group, place = next(
        (number, group.layers.index(index))
        for number, group in enumerate(config.kv_cache_groups)
        if index in group.layers
    )
    sinks = torch.empty(config.num_heads, dtype=torch.float32, device=device) if spec.has_sinks else None
    return AttentionLayer(group=group, index=place, spec=spec, transform=transform, sinks=sinks)
