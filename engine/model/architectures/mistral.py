"""Mistral: Llama with a window over the last tokens in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.model.model_config import ModelConfig, read_decoder_config, same_window


def read_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """See ``registry.ARCHITECTURES``."""
    return read_decoder_config(raw, architecture=name, windows=same_window(raw))
