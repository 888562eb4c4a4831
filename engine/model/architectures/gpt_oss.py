"""gpt-oss: attention with sinks, a window in every other layer, and experts with biases and a bounded gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from engine.contract.errors import CheckpointError
from engine.layers.experts.spec import MXFP4_BLOCK_SIZE, ExpertNames, GateClamp
from engine.model.model_config import (
    ModelConfig,
    Windows,
    named_windows,
    positive,
    read_decoder_config,
    read_experts,
    same_window,
)

NAMES = ExpertNames(router="mlp.router", gate_up=("mlp.experts.gate_up_proj",), down="mlp.experts.down_proj")
DEFAULT_SLIDING_WINDOW = 128
MXFP4 = "mxfp4"
DEFAULT_ALPHA, DEFAULT_LIMIT = 1.702, 7.0


def read_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """See ``registry.ARCHITECTURES``."""
    is_mxfp4 = (raw.get("quantization_config") or {}).get("quant_method") == MXFP4
    if is_mxfp4:
        raw = {**raw, "quantization_config": None}
        _check_blocks(raw)
    windows, has_bias = _windows(raw), bool(raw.get("attention_bias", True))
    experts = read_experts(
        raw,
        num_experts=positive(raw, "num_local_experts", default=128),
        num_active=4,
        inner_size=positive(raw, "intermediate_size"),
        is_normalized=True,
        names=NAMES,
        clamp=GateClamp(
            alpha=float(raw.get("swiglu_alpha", DEFAULT_ALPHA)), limit=float(raw.get("swiglu_limit", DEFAULT_LIMIT))
        ),
        is_mxfp4=is_mxfp4,
    )
    config = read_decoder_config(
        raw,
        architecture=name,
        windows=windows,
        head_dim=64,
        qkv_bias=has_bias,
        o_bias=has_bias,
        experts=(experts,) * len(windows),
    )
    return dataclasses.replace(
        config, attention=tuple(dataclasses.replace(spec, has_sinks=True) for spec in config.attention)
    )


def _check_blocks(raw: Mapping[str, Any]) -> None:
    for key in ("hidden_size", "intermediate_size"):
        if positive(raw, key) % MXFP4_BLOCK_SIZE:
            raise CheckpointError(
                f"config.json: {key} {raw[key]} is no multiple of {MXFP4_BLOCK_SIZE}, the numbers in a block of {MXFP4}"
            )


def _windows(raw: Mapping[str, Any]) -> Windows:
    """Every other layer has one, from the first, where ``layer_types`` does not say which."""
    window, *others = same_window({"sliding_window": DEFAULT_SLIDING_WINDOW, **raw})
    num_layers = 1 + len(others)
    alternating = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    return named_windows(raw.get("layer_types") or alternating, window, num_layers)
