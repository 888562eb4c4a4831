"""Mistral: Llama with a window over the last tokens in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.model.model_config import ModelConfig, read_decoder_config, same_window

NAME = "MistralForCausalLM"


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """See ``registry.Architecture``."""
    return read_decoder_config(raw, architecture=NAME, windows=same_window(raw))
