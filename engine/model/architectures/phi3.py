"""Phi-3 and Phi-4: projections that are stored as one, heads that may be rotated in part, longrope."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from engine.model.model_config import ModelConfig, optional_window, read_decoder_config
from engine.model.tensor_names import TensorNames

NAMES: Final = TensorNames(qkv=("self_attn.qkv_proj",), mlp_in=("mlp.gate_up_proj",))


def read_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """See ``registry.ARCHITECTURES``."""
    config = read_decoder_config(raw, architecture=name, windows=optional_window(raw), eps=1e-5, may_be_partial=True)
    return dataclasses.replace(config, names=NAMES)
