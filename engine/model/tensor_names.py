"""Where a checkpoint keeps a decoder's tensors, and with that which norms its layers have. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine.layers.layer_spec import MLPNames


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names without ``.weight`` and ``.bias``; those of a layer follow ``layers`` and its number.

    qkv, mlp_in: the projections that are one product here, in their order; a single name where the checkpoint has them
        fused as well.
    before_attention, after_attention, before_mlp, after_mlp: norms of what a part of a layer reads from the residual
        stream, and of what it adds to it; None: there is no such norm.
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
        """Those of a plain MLP."""
        return MLPNames(into=self.mlp_in, down=self.down, is_transposed=self.is_transposed)


LLAMA_NAMES: Final = TensorNames()
"""Of most architectures."""
