"""DeepSeek: V2, V2-Lite and V3, with latent attention, and experts beside an MLP that every token goes through."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from engine.contract.errors import CheckpointError
from engine.layers.attention_spec import AttentionSpec, LatentSpec
from engine.layers.experts.spec import ExpertNames, ExpertsSpec, GroupedRouterSpec
from engine.layers.layer_spec import MLPNames
from engine.layers.rope_config import RopeType, yarn_mscale
from engine.model.model_config import (
    ModelConfig,
    full_attention,
    positive,
    positive_number,
    read_decoder_config,
    read_experts,
)

V2: Final = "DeepseekV2ForCausalLM"
CPU_ONLY: Final = "latent attention"
NAMES: Final = ExpertNames(
    router="mlp.gate",
    gate_up=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    down="mlp.experts.{}.down_proj",
)
SHARED_NAMES: Final = MLPNames(
    into=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    down="mlp.shared_experts.down_proj",
    is_transposed=False,
)
WHOLE, BY_GROUP = "greedy", "group_limited_greedy"


def read_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """See ``registry.ARCHITECTURES``."""
    return _read_v2(raw, name) if name == V2 else _read_v3(raw, name)


def _read_v2(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """V2 chooses experts within groups, V2-Lite among all of them."""
    _only(raw, "topk_method", WHOLE, BY_GROUP)
    _only(raw, "scoring_func", "softmax")
    _only(raw, "norm_topk_prob", False)
    is_grouped = raw.get("topk_method") == BY_GROUP
    router = GroupedRouterSpec(
        num_groups=positive(raw, "n_group") if is_grouped else 1,
        num_open_groups=positive(raw, "topk_group") if is_grouped else 1,
        num_counted=1,
        is_sigmoid=False,
        has_correction=False,
        scale=positive_number(raw, "routed_scaling_factor", default=1.0),
    )
    return _read_decoder(
        raw,
        name,
        router=router,
        is_normalized=False,
        is_interleaved=True,
        num_plain=0,
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )


def _read_v3(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """V3 scores experts by sigmoids, with a correction for the choice only. A group's score sums its best two."""
    _only(raw, "topk_method", "noaux_tc")
    _only(raw, "scoring_func", "sigmoid")
    router = GroupedRouterSpec(
        num_groups=positive(raw, "n_group", default=8),
        num_open_groups=positive(raw, "topk_group", default=4),
        num_counted=2,
        is_sigmoid=True,
        has_correction=True,
        scale=positive_number(raw, "routed_scaling_factor", default=2.5),
    )
    config = _read_decoder(
        raw,
        name,
        router=router,
        is_normalized=bool(raw.get("norm_topk_prob", True)),
        is_interleaved=bool(raw.get("rope_interleave", True)),
        num_plain=3,
    )
    num_draft_layers = raw.get("num_nextn_predict_layers", 1) or 0
    return dataclasses.replace(config, num_draft_layers=int(num_draft_layers))


def _read_decoder(
    raw: Mapping[str, Any],
    name: str,
    *,
    router: GroupedRouterSpec,
    is_normalized: bool,
    is_interleaved: bool,
    num_plain: int,
    mlp_bias: bool = False,
) -> ModelConfig:
    """The parts of the configuration that V2 and V3 share.

    num_plain: the number of first layers without experts, for checkpoints that do not say.
    """
    _refuse_quantized(raw)
    has_bias = bool(raw.get("attention_bias", False))
    latent = LatentSpec(
        query_rank=None if _is_null(raw, "q_lora_rank") else positive(raw, "q_lora_rank", default=1536),
        rank=positive(raw, "kv_lora_rank", default=512),
        plain_size=positive(raw, "qk_nope_head_dim", default=128),
        rotated_size=positive(raw, "qk_rope_head_dim", default=64),
        value_size=positive(raw, "v_head_dim", default=128),
        is_interleaved=is_interleaved,
        has_bias=has_bias,
    )
    if latent.rotated_size % 2:
        raise CheckpointError(f"config.json: qk_rope_head_dim {latent.rotated_size} is odd")
    windows = full_attention(raw)
    # Attention sees a single key head: the cached vector.
    as_cached = {**raw, "num_key_value_heads": 1, "head_dim": latent.rank + latent.rank % 2}
    config = read_decoder_config(as_cached, architecture=name, windows=windows, o_bias=has_bias, mlp_bias=mlp_bias)
    _only(raw, "moe_layer_freq", 1)
    first = num_plain if raw.get("first_k_dense_replace") is None else int(raw["first_k_dense_replace"])
    experts = _experts(raw, router, is_normalized=is_normalized)
    return dataclasses.replace(
        config,
        head_dim=latent.cached_size,
        attention=tuple(_attention(spec, latent) for spec in config.attention),
        latent=latent,
        experts=tuple(None if layer < first else experts for layer in range(len(windows))),
    )


def _attention(spec: AttentionSpec, latent: LatentSpec) -> AttentionSpec:
    """Yarn's factor on vectors applies to a whole head, not only to its rotated part."""
    scale, rope = latent.head_size**-0.5, spec.rope
    if rope is not None and rope.rope_type is not RopeType.DEFAULT and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return dataclasses.replace(spec, scale=scale, value_size=latent.rank)


def _experts(raw: Mapping[str, Any], router: GroupedRouterSpec, *, is_normalized: bool) -> ExpertsSpec:
    num_experts = positive(raw, "n_routed_experts")
    inner_size = positive(raw, "moe_intermediate_size")
    experts = read_experts(
        raw,
        num_experts=num_experts,
        num_active=positive(raw, "num_experts_per_tok"),
        inner_size=inner_size,
        is_normalized=is_normalized,
        names=NAMES,
    )
    groups, opened = router.num_groups, router.num_open_groups
    if num_experts % groups or opened > groups or experts.num_active > opened * (num_experts // groups):
        raise CheckpointError(
            f"config.json: {num_experts} experts in n_group {groups}, of which topk_group {opened} are open, leave no "
            f"num_experts_per_tok {experts.num_active} to choose"
        )
    num_shared = 0 if _is_null(raw, "n_shared_experts") else positive(raw, "n_shared_experts")
    return dataclasses.replace(
        experts,
        router=router,
        shared=SHARED_NAMES if num_shared else None,
        shared_size=num_shared * inner_size,
    )


def _refuse_quantized(raw: Mapping[str, Any]) -> None:
    """Refuse FP8 weights, the format of most V3 checkpoints."""
    method = (raw.get("quantization_config") or {}).get("quant_method")
    if method == "fp8":
        raise CheckpointError(
            "config.json: weights in FP8 are not supported; convert the checkpoint to bfloat16 (DeepSeek's repository "
            "has fp8_cast_bf16.py for that), remove quantization_config from config.json, and serve the result"
        )


def _only(raw: Mapping[str, Any], key: str, *known: object) -> None:
    """Refuse the value of a key in config.json, unless it is missing, null, or in ``known``.

    Raises:
        CheckpointError: Names the key, its value, and what is supported.
    """
    value = raw.get(key)
    if value is not None and value not in known:
        supported = ", ".join(map(repr, known))
        raise CheckpointError(f"config.json: {key} {value!r} is not supported; supported: {supported}")


def _is_null(raw: Mapping[str, Any], key: str) -> bool:
    return key in raw and raw[key] is None
