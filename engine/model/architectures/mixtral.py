"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from engine.layers.experts.spec import ExpertNames
from engine.model.model_config import ModelConfig, optional_window, positive, read_decoder_config, read_experts

NAMES: Final = ExpertNames(
    router="block_sparse_moe.gate",
    gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    down="block_sparse_moe.experts.{}.w2",
)


def read_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """See ``registry.ARCHITECTURES``."""
    experts = read_experts(
        raw,
        num_experts=positive(raw, "num_local_experts", default=8),
        num_active=2,
        inner_size=positive(raw, "intermediate_size"),
        is_normalized=True,
        names=NAMES,
    )
    config = read_decoder_config(raw, architecture=name, windows=optional_window(raw), eps=1e-5)
    return dataclasses.replace(config, experts=(experts,) * config.num_layers)
