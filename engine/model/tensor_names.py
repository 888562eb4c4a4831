"""The names of a decoder's tensors in a checkpoint, which imply its layers' norms. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine.layers.layer_spec import MLPNames


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names without ``.weight`` and ``.bias``; those within a layer follow ``layers`` and the layer's number.

    qkv, mlp_in: the projections that are one product here, in order; a single name if the checkpoint has them fused.
    before_attention, after_attention, before_mlp, after_mlp: norms of a part's input from the residual stream, and of
        its result; None: no such norm.
    is_transposed: matrices are stored as [in_size, out_size].
    """

    embedding: str = "model.embed_tokens"
    positions: str = "model.embed_positions"
    norm: str = "model.norm"
    layers: str = "model.layers"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    is_transposed: bool = False

    @property
    def mlp(self) -> MLPNames:
        """The names of a plain MLP's tensors."""
        return MLPNames(into=self.mlp_in, down=self.down, is_transposed=self.is_transposed)


LLAMA_NAMES: Final = TensorNames()
"""The names in most architectures."""
