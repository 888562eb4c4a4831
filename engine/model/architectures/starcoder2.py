"""Starcoder2: norms that take the mean away, biases everywhere, an MLP without a gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from engine.layers.layer_spec import NormKind, NormSpec
from engine.model.model_config import ModelConfig, optional_window, positive_number, read_decoder_config
from engine.model.tensor_names import TensorNames

NAMES: Final = TensorNames(mlp_in=("mlp.c_fc",), down="mlp.c_proj")


def read_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """See ``registry.ARCHITECTURES``."""
    has_bias = bool(raw.get("use_bias", True))
    config = read_decoder_config(
        raw,
        architecture=name,
        windows=optional_window(raw),
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=has_bias,
        default_activation="gelu_pytorch_tanh",
        is_tied=True,
    )
    norm = NormSpec(kind=NormKind.LAYER, eps=positive_number(raw, "norm_epsilon", default=1e-5))
    return dataclasses.replace(config, norm=norm, has_gated_mlp=False, names=NAMES)
