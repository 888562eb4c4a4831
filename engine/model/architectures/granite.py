"""Granite: Llama whose embeddings, attention scores, residuals and logits are multiplied with numbers of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from engine.model.model_config import ModelConfig, full_attention, positive_number, read_decoder_config


def read_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """See ``registry.ARCHITECTURES``."""
    has_bias = bool(raw.get("attention_bias", False))
    config = read_decoder_config(
        raw,
        architecture=name,
        windows=full_attention(raw),
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )
    scale = positive_number(raw, "attention_multiplier", default=1.0)
    return dataclasses.replace(
        config,
        attention=tuple(dataclasses.replace(spec, scale=scale) for spec in config.attention),
        embedding_scale=positive_number(raw, "embedding_multiplier", default=1.0),
        residual_scale=positive_number(raw, "residual_multiplier", default=1.0),
        logit_scale=1 / positive_number(raw, "logits_scaling", default=1.0),
    )
