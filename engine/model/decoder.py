"""A decoder, its MLPs plain or mixtures: that of most architectures, which differ in what ``ModelConfig`` says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch

from engine.layers.attention_layer import AttentionLayer
from engine.layers.embedding import Embedding, LMHead
from engine.layers.experts.mixture import Mixture
from engine.layers.fused_ops import FusedOps
from engine.layers.heads import HeadTransform
from engine.layers.layer_spec import QueryKeyNorm
from engine.layers.linear import Linear
from engine.layers.mlp import MLP, FeedForward
from engine.layers.norm import Norm, RMSNorm, build_norm
from engine.layers.residual import ResidualNorms
from engine.layers.rotary import RotaryEmbedding, Rotations
from engine.model.model_config import ModelConfig
from engine.model.registry import architecture_module
from engine.model.step_context import StepContext


class DecoderLayer:
    """Attention and an MLP or a mixture of experts, each joined to the residual stream as the architecture has it."""

    def __init__(
        self, config: ModelConfig, *, index: int, dtype: torch.dtype, device: torch.device, fused_ops: FusedOps | None
    ) -> None:
        names = config.names
        norm = partial(build_norm, config.norm, dtype=dtype, device=device, fused_ops=fused_ops)
        linear = partial(Linear, dtype=dtype, device=device)

        def around(before: str | None, after: str | None) -> ResidualNorms:
            scale = config.residual_scale
            return ResidualNorms(
                before=norm(config.hidden_size, delta_scale=scale) if before is not None else None,
                after=norm(config.hidden_size) if after is not None else None,
                delta_scale=scale,
            )

        self.names, self.index = names, index
        self.rope = config.ropes.index(config.attention[index].rope)
        self.head_dim = config.head_dim
        self.attention_norms = around(names.before_attention, names.after_attention)
        self.qkv = linear(config.hidden_size, [config.q_size, config.kv_size, config.kv_size], bias=config.qkv_bias)
        self.projection_norms = _query_key_norms(config, QueryKeyNorm.PROJECTION, dtype, device)
        head_norms = _query_key_norms(config, QueryKeyNorm.HEAD, dtype, device)
        transform = HeadTransform(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            query_norm=head_norms[0] if head_norms else None,
            key_norm=head_norms[1] if head_norms else None,
            fused_ops=fused_ops,
        )
        self.attention = _attention_layer(config, index, transform, device)
        self.o = linear(config.q_size, [config.hidden_size], bias=config.o_bias)
        self.mlp_norms = around(names.before_mlp, names.after_mlp)
        self.mlp = _feed_forward(config, index, dtype=dtype, device=device, fused_ops=fused_ops)

    def targets(self) -> dict[str, torch.Tensor]:
        """Where each of this layer's tensors of a checkpoint goes."""
        names, transform = self.names, self.attention.transform
        places = self.mlp.targets()
        for linear, of_linear in ((self.qkv, names.qkv), (self.o, (names.o,))):
            places.update(linear.targets(of_linear, is_transposed=names.is_transposed))
        query_norm, key_norm = self.projection_norms or (transform.query_norm, transform.key_norm)
        norms: dict[str | None, Norm | None] = {
            names.before_attention: self.attention_norms.before,
            names.after_attention: self.attention_norms.after,
            names.before_mlp: self.mlp_norms.before,
            names.after_mlp: self.mlp_norms.after,
            names.query_norm: query_norm,
            names.key_norm: key_norm,
        }
        for name, norm in norms.items():
            if name is not None and norm is not None:
                places.update(norm.targets(name))
        if self.attention.sinks is not None:
            places["self_attn.sinks"] = self.attention.sinks
        return {f"{names.layers}.{self.index}.{name}": place for name, place in places.items()}

    def pack(self) -> None:
        """Hand the layer's matrices to the matrix library."""
        self.qkv.pack()
        self.o.pack()
        self.mlp.pack()

    def forward(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, rotations: Sequence[Rotations], context: StepContext
    ) -> torch.Tensor:
        """One layer over the tokens of a step.

        hidden: [num_tokens, hidden_size] the residual stream; ``delta``, what the layer before adds to it, and the
        attention's result are added in place.

        Returns:
            What this layer's MLP adds to the residual stream.
        """
        attended = self._attend(self.attention_norms.enter(hidden, delta), rotations, context)
        read = self.mlp_norms.enter(hidden, self.attention_norms.leave(attended))
        return self.mlp_norms.leave(self.mlp(read))

    def _attend(self, read: torch.Tensor, rotations: Sequence[Rotations], context: StepContext) -> torch.Tensor:
        layer, projected = self.attention, self.qkv(read)
        if self.projection_norms is not None:
            query, key, _ = torch.split(projected, self.qkv.out_sizes, dim=1)
            for norm, part in zip(self.projection_norms, (query, key), strict=True):
                norm.normalize_in_place(part)
        heads = projected.view(len(read), -1, self.head_dim)
        return self.o(context.plans[layer.group].attend_heads(layer, heads, rotations[self.rope]))


def _query_key_norms(
    config: ModelConfig, kind: QueryKeyNorm, dtype: torch.dtype, device: torch.device
) -> tuple[RMSNorm, RMSNorm] | None:
    """The norms of queries and keys, if the model has them and they are of this kind."""
    if config.qk_norm is not kind:
        return None
    is_head = kind is QueryKeyNorm.HEAD
    sizes = (config.head_dim, config.head_dim) if is_head else (config.q_size, config.kv_size)
    query_norm, key_norm = (RMSNorm(size, spec=config.norm, dtype=dtype, device=device) for size in sizes)
    return query_norm, key_norm


def _attention_layer(config: ModelConfig, index: int, transform: HeadTransform, device: torch.device) -> AttentionLayer:
    spec = config.attention[index]
    group, place = next(
        (number, group.layers.index(index))
        for number, group in enumerate(config.kv_cache_groups)
        if index in group.layers
    )
    sinks = torch.empty(config.num_heads, dtype=torch.float32, device=device) if spec.has_sinks else None
    return AttentionLayer(group=group, index=place, spec=spec, transform=transform, sinks=sinks)


def _feed_forward(
    config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device, fused_ops: FusedOps | None
) -> FeedForward:
    experts = config.experts[index] if config.experts else None
    if experts is not None:
        return Mixture(
            experts,
            config.hidden_size,
            activation=config.activation,
            dtype=dtype,
            device=device,
            fused_ops=fused_ops,
        )
    return MLP(
        config.hidden_size,
        config.intermediate_size,
        activation=config.activation,
        is_gated=config.has_gated_mlp,
        bias=config.mlp_bias,
        names=config.names.mlp,
        dtype=dtype,
        device=device,
        fused_ops=fused_ops,
    )


class Decoder:
    """Token ids and a paged cache in, hidden states and logits out. An architecture whose layers compute something else
    has a subclass, with its own ``layer_class`` (``registry.ARCHITECTURES``).

    ``has_own_head``: the checkpoint stores a head although config.json calls it tied; what is stored counts.
    ``fused_ops``: generated kernels to use between the matrix products, if there are any.
    """

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        has_own_head: bool = False,
        fused_ops: FusedOps | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.embedding = Embedding(
            config.vocab_size, config.hidden_size, scale=config.embedding_scale, dtype=dtype, device=device
        )
        self.positions: Embedding | None = None
        if config.num_learned_positions:
            self.positions = Embedding(config.num_learned_positions, config.hidden_size, dtype=dtype, device=device)
        self.layers = [
            self.layer_class(config, index=index, dtype=dtype, device=device, fused_ops=fused_ops)
            for index in range(config.num_layers)
        ]
        self.norm = build_norm(config.norm, config.hidden_size, dtype=dtype, device=device)
        self.lm_head = LMHead(
            self.embedding,
            tied=config.tie_word_embeddings and not has_own_head,
            scale=config.logit_scale,
            softcap=config.logit_softcap,
        )
        self.rotary = [
            RotaryEmbedding(rope, head_dim=config.head_dim, max_positions=max_positions, dtype=dtype, device=device)
            for rope in config.ropes
        ]

    def targets(self) -> dict[str, torch.Tensor]:
        """Where each tensor of a checkpoint goes, by its name there."""
        names = self.config.names
        places = {f"{names.embedding}.weight": self.embedding.weight, **self.norm.targets(names.norm)}
        if self.positions is not None:
            places[f"{names.positions}.weight"] = self.positions.weight
        places.update(self.lm_head.targets())
        for layer in self.layers:
            places.update(layer.targets())
        return places

    def finish_loading(self) -> None:
        """Hand the loaded matrices to the matrix library."""
        for layer in self.layers:
            layer.pack()
        self.lm_head.pack()

    def forward(self, input_ids: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Run the layers: token ids, [num_tokens], to hidden states before the last norm."""
        hidden = self.embedding(input_ids)
        if self.positions is not None:
            hidden = hidden.add_(self.positions(context.positions))
        rotations = [rotary.rotations(context.positions) for rotary in self.rotary]
        delta: torch.Tensor | None = None
        for layer in self.layers:
            delta = layer.forward(hidden, delta, rotations, context)
        return hidden if delta is None else hidden.add_(delta, alpha=self.config.residual_scale)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of every token of the vocabulary, [num_rows, vocab_size], for rows of ``forward``'s result."""
        return self.lm_head(self.norm.add_and_normalize(hidden, None))


def decoder_class(config: ModelConfig) -> type[Decoder]:
    """The model of a checkpoint's architecture."""
    model: type[Decoder] = getattr(architecture_module(config.architecture), "Model", Decoder)
    return model
