"""GPT-2: learnt positions instead of rotation, norms that take the mean away, an MLP without a gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from engine.contract.errors import CheckpointError
from engine.layers.attention_spec import AttentionSpec
from engine.layers.layer_spec import NormKind, NormSpec
from engine.model.model_config import ModelConfig, full_attention, positive, positive_number, read_decoder_config
from engine.model.tensor_names import TensorNames

NAMES: Final = TensorNames(
    embedding="transformer.wte",
    positions="transformer.wpe",
    norm="transformer.ln_f",
    layers="transformer.h",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    mlp_in=("mlp.c_fc",),
    down="mlp.c_proj",
    before_attention="ln_1",
    before_mlp="ln_2",
    is_transposed=True,
)


def read_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """See ``registry.ARCHITECTURES``. GPT-2 has its own names for the keys of config.json."""
    if raw.get("add_cross_attention"):
        raise CheckpointError("config.json: add_cross_attention is not supported; serve a model that is only a decoder")
    width = positive(raw, "n_embd")
    num_positions = positive(raw, "n_positions")
    common = {
        **raw,
        "hidden_size": width,
        "num_hidden_layers": positive(raw, "n_layer"),
        "num_attention_heads": positive(raw, "n_head"),
        "num_key_value_heads": positive(raw, "n_head"),
        "head_dim": width // positive(raw, "n_head"),
        "max_position_embeddings": num_positions,
        "intermediate_size": positive(raw, "n_inner", default=4 * width),
    }
    config = read_decoder_config(
        common,
        architecture=name,
        windows=full_attention(common),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        activation_key="activation_function",
        default_activation="gelu_new",
        is_tied=True,
    )
    return dataclasses.replace(
        config,
        attention=tuple(_attention(raw, spec, layer) for layer, spec in enumerate(config.attention)),
        norm=NormSpec(kind=NormKind.LAYER, eps=positive_number(raw, "layer_norm_epsilon", default=1e-5)),
        has_gated_mlp=False,
        num_learned_positions=num_positions,
        names=NAMES,
    )


def _attention(raw: Mapping[str, Any], spec: AttentionSpec, layer: int) -> AttentionSpec:
    scale = spec.scale if raw.get("scale_attn_weights", True) else 1.0
    if raw.get("scale_attn_by_inverse_layer_idx", False):
        scale /= layer + 1
    return dataclasses.replace(spec, rope=None, scale=scale)
