"""OLMo 3: OLMo 2 with a window in three layers of four, which are rotated without the scaling of the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from engine.contract.errors import CheckpointError
from engine.layers.rope_config import parse_rope_config
from engine.model.architectures import olmo2
from engine.model.model_config import ModelConfig, positive, sliding_window, windows_by_type

DEFAULT_PERIOD: Final = 4
DEFAULT_THETA: Final = 5e5
WINDOWED, FULL = "sliding_attention", "full_attention"


def read_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """See ``registry.ARCHITECTURES``."""
    ropes = _rope_parameters(raw)
    config = olmo2.read_config({**raw, "rope_scaling": None, "rope_parameters": ropes[FULL]}, name)
    layer_types = _layer_types(raw, num_layers=config.num_layers)
    windows = windows_by_type(layer_types, num_layers=config.num_layers, window=sliding_window(raw))
    window_rope = parse_rope_config(
        {"rope_parameters": ropes[WINDOWED]},
        max_position_embeddings=positive(raw, "max_position_embeddings"),
        head_dim=config.head_dim,
    )
    return dataclasses.replace(
        config,
        attention=tuple(
            dataclasses.replace(spec, window=window, rope=window_rope if layer_type == WINDOWED else spec.rope)
            for spec, window, layer_type in zip(config.attention, windows, layer_types, strict=True)
        ),
    )


def _layer_types(raw: Mapping[str, Any], *, num_layers: int) -> Sequence[str]:
    """What config.json says; by default every fourth layer sees everything."""
    stated: Sequence[str] | None = raw.get("layer_types")
    if stated is not None:
        return stated
    return [WINDOWED if (layer + 1) % DEFAULT_PERIOD else FULL for layer in range(num_layers)]


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Rotations by the type of layer, from one key for each type or from the older keys, which scale full layers.

    Raises:
        CheckpointError: There is one rotation for all layers: transformers takes no notice of it.
    """
    stated = raw.get("rope_parameters") or {}
    if unknown := stated.keys() - {FULL, WINDOWED}:
        raise CheckpointError(
            f"config.json: rope_parameters has {', '.join(sorted(unknown))} where it must name {FULL} and {WINDOWED}"
        )
    theta = {"rope_theta": raw.get("rope_theta") or DEFAULT_THETA}
    return {
        FULL: theta | (raw.get("rope_scaling") or {}) | (stated.get(FULL) or {}),
        WINDOWED: theta | (stated.get(WINDOWED) or {}),
    }
