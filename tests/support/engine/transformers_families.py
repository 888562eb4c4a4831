"""Architectures that Baton runs with transformers' code: the settings that make each one small."""

from __future__ import annotations

from typing import Any

WINDOW = 20

TRANSFORMERS_FIELDS: dict[str, dict[str, Any]] = {
    "arcee": {},
    "cohere": {"logit_scale": 0.7, "use_qk_norm": True},
    "cohere2": {"sliding_window": WINDOW, "num_hidden_layers": 4, "logit_scale": 0.7},
    "ernie4_5": {"head_dim": 16},
    "exaone4": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": {
        "head_dim": 16,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "gpt_bigcode": {"n_positions": 1024},
    "gpt_neox": {"rotary_pct": 0.5},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "ministral": {"sliding_window": WINDOW, "head_dim": 32},
    "nanochat": {},
    "nemotron": {},
    "olmo": {"clip_qkv": 2.5},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "persimmon": {},
    "phi": {"partial_rotary_factor": 0.5},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 56,
    },
    "seed_oss": {"head_dim": 16},
    "stablelm": {"use_qkv_bias": True},
    "vaultgemma": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "num_hidden_layers": 4,
        "attn_logit_softcapping": 6.0,
        "final_logit_softcapping": 25.0,
        "query_pre_attn_scalar": 24,
    },
}
"""By ``model_type`` of config.json: the fields that differ from the usual small shape (checkpoints.py)."""

TRANSFORMERS_FAMILIES = tuple(TRANSFORMERS_FIELDS)
