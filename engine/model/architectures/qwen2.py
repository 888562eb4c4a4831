"""Qwen2: biases on queries, keys and values; a window in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.model.model_config import ModelConfig, read_decoder_config, windows_of_layers


def read_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """See ``registry.ARCHITECTURES``."""
    return read_decoder_config(raw, architecture=name, windows=windows_of_layers(raw), qkv_bias=True)
