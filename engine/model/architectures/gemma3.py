"""Gemma 3, text: Gemma 2 with norms of queries and keys instead of caps, five windowed layers in six, two rotations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from engine.contract.errors import CheckpointError
from engine.layers.layer_spec import QueryKeyNorm
from engine.layers.rope_config import parse_rope_config
from engine.model.architectures.gemma2 import read_cap, read_gemma_config
from engine.model.model_config import ModelConfig, positive

DEFAULT_PERIOD: Final = 6
DEFAULT_THETA: Final = 1e6
DEFAULT_WINDOW_THETA: Final = 1e4


def read_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """See ``registry.ARCHITECTURES``."""
    cap = raw.get("attn_logit_softcapping")
    if cap is not None:
        raise CheckpointError(
            f"config.json: attn_logit_softcapping {cap} is not supported: Gemma 3 was trained without it; remove it"
        )
    ropes = _rope_parameters(raw)
    pattern_key = next((key for key in ("sliding_window_pattern", "_sliding_window_pattern") if raw.get(key)), "")
    config = read_gemma_config(
        {**raw, "rope_scaling": None, "rope_parameters": ropes["full_attention"]},
        architecture=name,
        period=positive(raw, pattern_key, default=DEFAULT_PERIOD),
        qk_norm=QueryKeyNorm.HEAD,
    )
    max_model_len = positive(raw, "max_position_embeddings")
    window_rope = parse_rope_config(
        {"rope_parameters": ropes["sliding_attention"]},
        max_position_embeddings=max_model_len,
        head_dim=config.head_dim,
    )
    specs = (spec if spec.window is None else dataclasses.replace(spec, rope=window_rope) for spec in config.attention)
    return dataclasses.replace(
        config,
        attention=tuple(specs),
        max_model_len=max_model_len,  # the stated length includes the scaling
        logit_softcap=read_cap(raw, "final_logit_softcapping", default=None),
    )


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Rotations of layers with and without a window, from one key for each kind or from the older keys."""
    stated = raw.get("rope_parameters") or {}
    full = {"rope_theta": raw.get("rope_theta") or DEFAULT_THETA, **(raw.get("rope_scaling") or {})}
    windowed = {"rope_theta": raw.get("rope_local_base_freq") or DEFAULT_WINDOW_THETA}
    return {
        "full_attention": full | (stated.get("full_attention") or {}),
        "sliding_attention": windowed | (stated.get("sliding_attention") or {}),
    }
