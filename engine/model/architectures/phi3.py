"""Phi-3 and Phi-4: projections that are stored as one, heads that may be rotated in part, longrope."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from engine.layers.rope_config import RopeType
from engine.model.model_config import ModelConfig, optional_window, read_decoder_config
from engine.model.tensor_names import TensorNames

NAMES: Final = TensorNames(qkv=("self_attn.qkv_proj",), mlp_in=("mlp.gate_up_proj",))


def read_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """See ``registry.ARCHITECTURES``."""
    raw = _with_longrope(raw)
    config = read_decoder_config(raw, architecture=name, windows=optional_window(raw), eps=1e-5, may_be_partial=True)
    return dataclasses.replace(config, names=NAMES)


def _with_longrope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Older files of this architecture say yarn where they mean longrope; treated as in transformers."""
    for key in ("rope_scaling", "rope_parameters"):
        parameters = raw.get(key) or {}
        if (parameters.get("rope_type") or parameters.get("type")) == RopeType.YARN:
            raw = {**raw, key: {**parameters, "rope_type": RopeType.LONGROPE}}
    return raw
