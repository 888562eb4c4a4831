"""SmolLM3: Llama with layers, every fourth by default, whose queries and keys are not rotated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from engine.contract.errors import CheckpointError
from engine.model.model_config import (
    ModelConfig,
    Windows,
    full_attention,
    positive,
    read_decoder_config,
    windows_by_type,
)

DEFAULT_THETA: Final = 2e6
DEFAULT_INTERVAL: Final = 4


def read_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """See ``registry.ARCHITECTURES``."""
    has_bias = bool(raw.get("attention_bias", False))
    is_rotated = _rotated_layers(raw)
    config = read_decoder_config(
        {"rope_theta": DEFAULT_THETA, **raw},
        architecture=name,
        windows=_windows(raw, is_rotated),
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        is_tied=True,
    )
    specs = (
        spec if rotated else dataclasses.replace(spec, rope=None)
        for spec, rotated in zip(config.attention, is_rotated, strict=True)
    )
    return dataclasses.replace(config, attention=tuple(specs))


def _rotated_layers(raw: Mapping[str, Any]) -> list[bool]:
    """Which layers rotate: those with a 1 in ``no_rope_layers``, despite the key's name."""
    num_layers = positive(raw, "num_hidden_layers")
    listed = raw.get("no_rope_layers")
    if listed is None:
        interval = positive(raw, "no_rope_layer_interval", default=DEFAULT_INTERVAL)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if len(listed) < num_layers:
        raise CheckpointError(f"config.json: no_rope_layers names {len(listed)} layers, but there are {num_layers}")
    return [bool(rotates) for rotates in listed[:num_layers]]


def _windows(raw: Mapping[str, Any], is_rotated: list[bool]) -> Windows:
    """If windows are on: the layers that do not rotate have one, or those that ``layer_types`` names."""
    if not raw.get("use_sliding_window", False) or raw.get("sliding_window") is None:
        return full_attention(raw)
    layer_types = raw.get("layer_types") or [
        "full_attention" if rotated else "sliding_attention" for rotated in is_rotated
    ]
    return windows_by_type(layer_types, num_layers=len(is_rotated), window=positive(raw, "sliding_window"))
