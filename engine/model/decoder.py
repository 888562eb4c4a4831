"""The decoder of most architectures, with plain MLPs or mixtures. They differ only in their ``ModelConfig``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch

from engine.contract.step import IntArray
from engine.layers.embedding import Embedding, LMHead
from engine.layers.experts.mixture import Mixture, SharedExperts
from engine.layers.fused_ops import FusedOps
from engine.layers.mlp import MLP, FeedForward
from engine.layers.norm import Norm, ResidualNorms, ResidualSum, build_norm
from engine.layers.rotary import RotaryEmbedding, Rotations
from engine.model.latent_attention import LatentAttention
from engine.model.model_config import ModelConfig
from engine.model.registry import architecture_module
from engine.model.self_attention import Attention, SelfAttention
from engine.model.step_context import StepContext


class DecoderLayer:
    """Attention and an MLP or mixture of experts, each connected to the residual stream as the architecture says."""

    def __init__(
        self, config: ModelConfig, *, index: int, dtype: torch.dtype, device: torch.device, fused_ops: FusedOps | None
    ) -> None:
        names = config.names
        norm = partial(build_norm, config.norm, dtype=dtype, device=device, fused_ops=fused_ops)

        def around(before: str | None, after: str | None) -> ResidualNorms:
            scale = config.residual_scale
            return ResidualNorms(
                before=norm(config.hidden_size, delta_scale=scale) if before is not None else None,
                after=norm(config.hidden_size) if after is not None else None,
                add=ResidualSum(scale, dtype=dtype, device=device),
            )

        self.names, self.index = names, index
        self.attention_norms = around(names.before_attention, names.after_attention)
        self.attention = _attention(config, index, dtype=dtype, device=device, fused_ops=fused_ops)
        self.mlp_norms = around(names.before_mlp, names.after_mlp)
        self.mlp = _feed_forward(config, index, dtype=dtype, device=device, fused_ops=fused_ops)

    def targets(self) -> dict[str, torch.Tensor]:
        """The destination of each of this layer's tensors in a checkpoint."""
        names = self.names
        places = {**self.mlp.targets(), **self.attention.targets()}
        norms: dict[str | None, Norm | None] = {
            names.before_attention: self.attention_norms.before,
            names.after_attention: self.attention_norms.after,
            names.before_mlp: self.mlp_norms.before,
            names.after_mlp: self.mlp_norms.after,
        }
        for name, norm in norms.items():
            if name is not None and norm is not None:
                places.update(norm.targets(name))
        return {f"{names.layers}.{self.index}.{name}": place for name, place in places.items()}

    def pack(self) -> None:
        """Let the matrix library repack the layer's matrices."""
        self.attention.pack()
        self.mlp.pack()

    def forward(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, rotations: Sequence[Rotations], context: StepContext
    ) -> torch.Tensor:
        """One layer over the tokens of a step.

        hidden: [num_tokens, hidden_size] the residual stream. ``delta``, the previous layer's result, and the
            attention's result are added to it in place.

        Returns:
            What this layer's MLP adds to the residual stream.
        """
        attended = self.attention(self.attention_norms.enter(hidden, delta), rotations, context)
        read = self.mlp_norms.enter(hidden, self.attention_norms.leave(attended))
        return self.mlp_norms.leave(self.mlp(read))


def _attention(
    config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device, fused_ops: FusedOps | None
) -> Attention:
    if config.latent is not None:
        return LatentAttention(config, index, dtype=dtype, device=device)
    return SelfAttention(config, index, dtype=dtype, device=device, fused_ops=fused_ops)


def _feed_forward(
    config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device, fused_ops: FusedOps | None
) -> FeedForward:
    experts = config.experts[index] if config.experts else None
    mlp = partial(
        MLP,
        config.hidden_size,
        activation=config.activation,
        is_gated=config.has_gated_mlp,
        bias=config.mlp_bias,
        dtype=dtype,
        device=device,
        fused_ops=fused_ops,
    )
    if experts is None:
        return mlp(config.intermediate_size, names=config.names.mlp)
    mixture = Mixture(
        experts,
        config.hidden_size,
        activation=config.activation,
        dtype=dtype,
        device=device,
        fused_ops=fused_ops,
    )
    if experts.shared is None:
        return mixture
    return SharedExperts(mixture, mlp(experts.shared_size, names=experts.shared))


class Decoder:
    """Turns token ids and a paged cache into hidden states and logits. An architecture with other layers has a subclass
    with its own ``layer_class`` (``registry.ARCHITECTURES``).

    ``has_own_head``: the checkpoint stores a head although config.json calls it tied; the stored one is used.
    ``fused_ops``: generated kernels to use between the matrix products, if any.
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
        table = partial(torch.empty, dtype=dtype, device=device)
        self.embedding = Embedding(table(config.vocab_size, config.hidden_size), scale=config.embedding_scale)
        self.positions: Embedding | None = None
        if config.num_learned_positions:
            self.positions = Embedding(table(config.num_learned_positions, config.hidden_size))
        self._add_positions = ResidualSum(1.0, dtype=dtype, device=device)
        self.layers = [
            self.layer_class(config, index=index, dtype=dtype, device=device, fused_ops=fused_ops)
            for index in range(config.num_layers)
        ]
        self.norm = build_norm(config.norm, config.hidden_size, dtype=dtype, device=device)
        self._add = ResidualSum(config.residual_scale, dtype=dtype, device=device)
        self.lm_head = LMHead(
            self.embedding,
            tied=config.tie_word_embeddings and not has_own_head,
            scale=config.logit_scale,
            softcap=config.logit_softcap,
        )
        self.rotary = [
            RotaryEmbedding(rope, head_dim=config.rope_dim, max_positions=max_positions, dtype=dtype, device=device)
            for rope in config.ropes
        ]

    def targets(self) -> dict[str, torch.Tensor]:
        """The destination of each tensor of a checkpoint, by its name there."""
        names = self.config.names
        places = {f"{names.embedding}.weight": self.embedding.weight, **self.norm.targets(names.norm)}
        if self.positions is not None:
            places[f"{names.positions}.weight"] = self.positions.weight
        places.update(self.lm_head.targets())
        for layer in self.layers:
            places.update(layer.targets())
        return places

    def finish_loading(self) -> None:
        """Let the matrix library repack the loaded matrices."""
        for layer in self.layers:
            layer.pack()
        self.lm_head.pack()

    def forward(self, input_ids: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Run the layers: token ids, [num_tokens], to hidden states before the last norm."""
        hidden = self.embedding(input_ids)
        if self.positions is not None:
            hidden = self._add_positions(hidden, self.positions(context.positions))
        rotations = [rotary.rotations(context.positions) for rotary in self.rotary]
        delta: torch.Tensor | None = None
        for layer in self.layers:
            if context.between_layers is not None:
                context.between_layers()
            delta = layer.forward(hidden, delta, rotations, context)
        return hidden if delta is None else self._add(hidden, delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the vocabulary, [num_rows, vocab_size], for rows of ``forward``'s result."""
        return self.lm_head(self.norm.add_and_normalize(hidden, None))

    def best_tokens(self, hidden: torch.Tensor) -> IntArray | None:
        """See ``LoadedModel``."""
        if not self.lm_head.finds_best:
            return None
        return self.lm_head.best_tokens(self.norm.add_and_normalize(hidden, None))


def decoder_class(config: ModelConfig) -> type[Decoder]:
    """The model class for a checkpoint's architecture."""
    model: type[Decoder] = getattr(architecture_module(config.architecture), "Model", Decoder)
    return model
