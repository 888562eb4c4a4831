"""OLMo 2: norms of what a layer adds instead of what it reads, and of queries and keys over all their heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from engine.layers.layer_spec import QueryKeyNorm
from engine.model.model_config import ModelConfig, full_attention, read_decoder_config
from engine.model.tensor_names import TensorNames

NAMES: Final = TensorNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


def read_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """See ``registry.ARCHITECTURES``."""
    has_bias = bool(raw.get("attention_bias", False))
    config = read_decoder_config(
        raw,
        architecture=name,
        windows=full_attention(raw),
        eps=1e-5,
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm=QueryKeyNorm.PROJECTION,
    )
    return dataclasses.replace(config, names=NAMES)
