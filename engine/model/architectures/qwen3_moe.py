"""Qwen3-MoE: Qwen3 with a mixture of experts in the layers that config.json does not name as plain ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from engine.contract.errors import CheckpointError
from engine.layers.experts.spec import ExpertNames
from engine.layers.layer_spec import QueryKeyNorm
from engine.model.model_config import (
    ModelConfig,
    full_attention,
    positive,
    read_decoder_config,
    read_experts,
    same_window,
)

NAMES: Final = ExpertNames(
    router="mlp.gate",
    gate_up=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    down="mlp.experts.{}.down_proj",
)


def read_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """See ``registry.ARCHITECTURES``. A window applies to all layers here; in Qwen3 only to some."""
    has_bias = bool(raw.get("attention_bias", False))
    windows = same_window(raw) if raw.get("use_sliding_window") else full_attention(raw)
    experts = read_experts(
        raw,
        num_experts=positive(raw, "num_local_experts", default=positive(raw, "num_experts", default=128)),
        num_active=8,
        inner_size=positive(raw, "moe_intermediate_size", default=768),
        is_normalized=bool(raw.get("norm_topk_prob", False)),
        names=NAMES,
    )
    step, plain = positive(raw, "decoder_sparse_step", default=1), _plain_layers(raw)
    has_experts = [layer not in plain and (layer + 1) % step == 0 for layer in range(len(windows))]
    config = read_decoder_config(
        raw,
        architecture=name,
        windows=windows,
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm=QueryKeyNorm.HEAD,
    )
    return dataclasses.replace(config, experts=tuple(experts if mixes else None for mixes in has_experts))


def _plain_layers(raw: Mapping[str, Any]) -> list[int]:
    layers = raw.get("mlp_only_layers") or []
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise CheckpointError(f"config.json: mlp_only_layers must be a list of layer numbers, got {layers!r}")
    return layers
