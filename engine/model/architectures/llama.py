"""Llama: grouped-query attention over everything before; biases where config.json says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.model.model_config import ModelConfig, full_attention, read_decoder_config


def read_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """See ``registry.ARCHITECTURES``."""
    has_bias = bool(raw.get("attention_bias", False))
    return read_decoder_config(
        raw,
        architecture=name,
        windows=full_attention(raw),
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )
