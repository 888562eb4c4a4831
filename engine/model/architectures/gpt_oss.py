"""gpt-oss: experts with biases and a bounded gate, attention with sinks, a window in every other layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from engine.contract.errors import CheckpointError
from engine.layers.experts.spec import MXFP4_BLOCK_SIZE, ExpertNames
from engine.layers.layer_spec import GateClamp
from engine.model.model_config import (
    ModelConfig,
    Windows,
    positive,
    positive_number,
    read_decoder_config,
    read_experts,
    sliding_window,
    windows_by_type,
)

NAMES: Final = ExpertNames(router="mlp.router", gate_up=("mlp.experts.gate_up_proj",), down="mlp.experts.down_proj")
CPU_ONLY: Final = "attention sinks"
DEFAULT_SLIDING_WINDOW: Final = 128
MXFP4: Final = "mxfp4"
DEFAULT_ALPHA: Final = 1.702
DEFAULT_LIMIT: Final = 7.0


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
            alpha=positive_number(raw, "swiglu_alpha", default=DEFAULT_ALPHA),
            limit=positive_number(raw, "swiglu_limit", default=DEFAULT_LIMIT),
        ),
        is_mxfp4=is_mxfp4,
    )
    config = read_decoder_config(
        raw,
        architecture=name,
        windows=windows,
        head_dim=64,
        eps=1e-5,
        qkv_bias=has_bias,
        o_bias=has_bias,
    )
    return dataclasses.replace(
        config,
        attention=tuple(dataclasses.replace(spec, has_sinks=True) for spec in config.attention),
        experts=(experts,) * len(windows),
    )


def _check_blocks(raw: Mapping[str, Any]) -> None:
    for key in ("hidden_size", "intermediate_size"):
        if positive(raw, key) % MXFP4_BLOCK_SIZE:
            raise CheckpointError(
                f"config.json: {key} {raw[key]} is no multiple of {MXFP4_BLOCK_SIZE}, the numbers in a block of {MXFP4}"
            )


def _windows(raw: Mapping[str, Any]) -> Windows:
    """The windows of the layers; without ``layer_types``, every other layer has one, beginning with the first."""
    num_layers = positive(raw, "num_hidden_layers")
    window = sliding_window({"sliding_window": DEFAULT_SLIDING_WINDOW, **raw})
    alternating = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    return windows_by_type(raw.get("layer_types") or alternating, num_layers=num_layers, window=window)
