"""A decoder, its MLPs plain or mixtures: that of most architectures, which differ in what ``ModelConfig`` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from engine.layers.attention_layer import AttentionLayer
from engine.layers.embedding import Embedding, LMHead
from engine.layers.experts.mixture import Mixture
from engine.layers.fused_ops import FusedOps
from engine.layers.gated_mlp import FeedForward, GatedMLP
from engine.layers.heads import HeadTransform
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryEmbedding, Rotations
from engine.model.model_config import ModelConfig
from engine.model.registry import architecture_module
from engine.model.step_context import StepContext


class DecoderLayer:
    """Attention and an MLP or a mixture of experts, each on the normalised residual stream."""

    def __init__(
        self, config: ModelConfig, *, index: int, dtype: torch.dtype, device: torch.device, fused_ops: FusedOps | None
    ) -> None:
        def linear(in_size: int, *out_sizes: int, bias: bool) -> Linear:
            return Linear(in_size, out_sizes, bias=bias, dtype=dtype, device=device)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, eps=config.rms_norm_eps, dtype=dtype, device=device, fused_ops=fused_ops)

        self.index = index
        self.rope = config.ropes.index(config.attention[index].rope)
        self.head_dim = config.head_dim
        self.input_norm = norm(config.hidden_size)
        self.qkv = linear(config.hidden_size, config.q_size, config.kv_size, config.kv_size, bias=config.qkv_bias)
        self.attention = _attention_layer(
            config,
            index,
            HeadTransform(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                query_norm=norm(config.head_dim) if config.qk_norm else None,
                key_norm=norm(config.head_dim) if config.qk_norm else None,
                fused_ops=fused_ops,
            ),
            device,
        )
        self.o = linear(config.q_size, config.hidden_size, bias=config.o_bias)
        self.post_norm = norm(config.hidden_size)
        self.mlp = _feed_forward(config, index, dtype=dtype, device=device, fused_ops=fused_ops)

    def targets(self) -> dict[str, torch.Tensor]:
        """Where each of this layer's tensors of a checkpoint goes."""
        places: dict[str, torch.Tensor] = {}
        places.update(self.qkv.targets(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")))
        places.update(self.o.targets(("self_attn.o_proj",)))
        places.update(self.mlp.targets())
        places["input_layernorm.weight"] = self.input_norm.weight
        places["post_attention_layernorm.weight"] = self.post_norm.weight
        transform = self.attention.transform
        if transform.query_norm is not None and transform.key_norm is not None:
            places["self_attn.q_norm.weight"] = transform.query_norm.weight
            places["self_attn.k_norm.weight"] = transform.key_norm.weight
        if self.attention.sinks is not None:
            places["self_attn.sinks"] = self.attention.sinks
        return {f"model.layers.{self.index}.{name}": place for name, place in places.items()}

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
        attended = self._attend(self.input_norm.add_and_normalize(hidden, delta), rotations, context)
        return self.mlp(self.post_norm.add_and_normalize(hidden, attended))

    def _attend(self, normalized: torch.Tensor, rotations: Sequence[Rotations], context: StepContext) -> torch.Tensor:
        layer = self.attention
        heads = self.qkv(normalized).view(len(normalized), -1, self.head_dim)
        return self.o(context.plans[layer.group].attend_heads(layer, heads, rotations[self.rope]))


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
        return Mixture(experts, config.hidden_size, dtype=dtype, device=device, fused_ops=fused_ops)
    return GatedMLP(
        config.hidden_size,
        config.intermediate_size,
        bias=config.mlp_bias,
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
        self.embedding = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [
            self.layer_class(config, index=index, dtype=dtype, device=device, fused_ops=fused_ops)
            for index in range(config.num_layers)
        ]
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype, device=device)
        self.lm_head = LMHead(self.embedding, tied=config.tie_word_embeddings and not has_own_head)
        self.rotary = [
            RotaryEmbedding(rope, head_dim=config.head_dim, max_positions=max_positions, dtype=dtype, device=device)
            for rope in config.ropes
        ]

    def targets(self) -> dict[str, torch.Tensor]:
        """Where each tensor of a checkpoint goes, by its name there."""
        places = {"model.embed_tokens.weight": self.embedding.weight, "model.norm.weight": self.norm.weight}
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
        rotations = [rotary.rotations(context.positions) for rotary in self.rotary]
        delta: torch.Tensor | None = None
        for layer in self.layers:
            delta = layer.forward(hidden, delta, rotations, context)
        return hidden if delta is None else hidden.add_(delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of every token of the vocabulary, [num_rows, vocab_size], for rows of ``forward``'s result."""
        return self.lm_head(self.norm.add_and_normalize(hidden, None))


def decoder_class(config: ModelConfig) -> type[Decoder]:
    """The model of a checkpoint's architecture."""
    model: type[Decoder] = getattr(architecture_module(config.architecture), "Model", Decoder)
    return model
