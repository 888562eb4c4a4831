"""DeepSeek V3: DeepSeek V2 whose experts are chosen by sigmoids, which are corrected for the choice alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from engine.layers.experts.spec import GroupedRouterSpec
from engine.model.architectures.deepseek_v2 import CPU_ONLY as CPU_ONLY
from engine.model.architectures.deepseek_v2 import only, read_latent_decoder
from engine.model.model_config import ModelConfig, positive, positive_number

NUM_COUNTED: Final = 2
"""Experts whose scores a group is worth."""

NUM_DRAFT_LAYERS: Final = 1


def read_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """See ``registry.ARCHITECTURES``."""
    only(raw, "topk_method", "noaux_tc")
    only(raw, "scoring_func", "sigmoid")
    router = GroupedRouterSpec(
        num_groups=positive(raw, "n_group", default=8),
        num_open_groups=positive(raw, "topk_group", default=4),
        num_counted=NUM_COUNTED,
        is_sigmoid=True,
        has_correction=True,
        scale=positive_number(raw, "routed_scaling_factor", default=2.5),
    )
    config = read_latent_decoder(
        raw,
        name,
        router=router,
        is_normalized=bool(raw.get("norm_topk_prob", True)),
        is_interleaved=bool(raw.get("rope_interleave", True)),
        query_rank=1536,
        num_plain=3,
    )
    num_draft_layers = raw.get("num_nextn_predict_layers", NUM_DRAFT_LAYERS) or 0
    return dataclasses.replace(config, num_draft_layers=int(num_draft_layers))
