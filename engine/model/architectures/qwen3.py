"""Qwen3: queries and keys are normalised per head before rotation; a window in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.layers.layer_spec import QueryKeyNorm
from engine.model.model_config import ModelConfig, read_decoder_config, windows_of_layers


def read_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """See ``registry.ARCHITECTURES``."""
    has_bias = bool(raw.get("attention_bias", False))
    return read_decoder_config(
        raw,
        architecture=name,
        windows=windows_of_layers(raw),
        head_dim=128,
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm=QueryKeyNorm.HEAD,
    )
