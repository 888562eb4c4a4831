"""Gemma 2: caps on scores and logits, norms before and after each part of a layer, a window in every other layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

from engine.contract.errors import CheckpointError
from engine.layers.layer_spec import QueryKeyNorm
from engine.model.model_config import (
    ModelConfig,
    positive,
    positive_number,
    read_decoder_config,
    sliding_window,
    windows_by_type,
)
from engine.model.tensor_names import TensorNames

NAMES: Final = TensorNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
CPU_ONLY: Final = "capped attention scores"
DEFAULT_HEAD_DIM: Final = 256
DEFAULT_QUERY_SCALAR: Final = 256.0
DEFAULT_SCORE_CAP: Final = 50.0
DEFAULT_LOGIT_CAP: Final = 30.0


def read_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """See ``registry.ARCHITECTURES``."""
    config = read_gemma_config(raw, architecture=name, period=2, qk_norm=QueryKeyNorm.NONE)
    softcap = read_cap(raw, "attn_logit_softcapping", default=DEFAULT_SCORE_CAP)
    return dataclasses.replace(
        config,
        attention=tuple(dataclasses.replace(spec, softcap=softcap) for spec in config.attention),
        logit_softcap=read_cap(raw, "final_logit_softcapping", default=DEFAULT_LOGIT_CAP),
    )


def read_gemma_config(raw: Mapping[str, Any], *, architecture: str, period: int, qk_norm: QueryKeyNorm) -> ModelConfig:
    """What Gemma 2 and 3 share. If ``layer_types`` is missing, every ``period``-th layer has no window.

    Raises:
        CheckpointError: As ``read_decoder_config``, and if attention is bidirectional.
    """
    if raw.get("use_bidirectional_attention"):
        raise CheckpointError(
            "config.json: use_bidirectional_attention is not supported: tokens would see later ones; "
            "serve a checkpoint that generates text"
        )
    num_layers = positive(raw, "num_hidden_layers")
    layer_types = raw.get("layer_types") or [
        "sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)
    ]
    has_bias = bool(raw.get("attention_bias", False))
    config = read_decoder_config(
        raw,
        architecture=architecture,
        windows=windows_by_type(layer_types, num_layers=num_layers, window=sliding_window(raw)),
        head_dim=DEFAULT_HEAD_DIM,
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm=qk_norm,
        activation_key="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        is_tied=True,
    )
    scale = 1 / math.sqrt(positive_number(raw, "query_pre_attn_scalar", default=DEFAULT_QUERY_SCALAR))
    return dataclasses.replace(
        config,
        attention=tuple(dataclasses.replace(spec, scale=scale) for spec in config.attention),
        norm=dataclasses.replace(config.norm, offset=1.0),
        embedding_scale=math.sqrt(config.hidden_size),
        names=NAMES,
    )


def read_cap(raw: Mapping[str, Any], key: str, *, default: float | None) -> float | None:
    """A softcap from config.json. null means no cap; a missing key means ``default``."""
    if key in raw and raw[key] is None:
        return None
    return default if key not in raw else positive_number(raw, key)
