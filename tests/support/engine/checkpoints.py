"""Small random checkpoints of every architecture, made by transformers, which also computes their reference outputs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)
from transformers.utils import logging as transformers_logging

from tests.support.engine.transformers_families import TRANSFORMERS_FIELDS

transformers_logging.disable_progress_bar()

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures on which everything is tested."""

MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")
"""Architectures with experts."""

LATENT_FAMILIES = ("deepseek_v2_lite", "deepseek_v2", "deepseek_v3")
"""Architectures that cache latents; they have experts too."""

DENSE_FAMILIES = ("olmo2", "olmo3", "smollm3", "granite", "phi3", "gemma2", "gemma3", "starcoder2", "gpt2")
FAMILIES = (*DENSE_FAMILIES, *MIXTURES, *LATENT_FAMILIES)
"""The other architectures, of which only the computation is tested."""

VOCAB_SIZE = 320
MAX_POSITION_EMBEDDINGS = 1024
MATRIX_STD = 0.15
EMBEDDING_STD = 1.0
HEAD_STD = 0.3
"""Large, so that logits spread over tens and rounding hardly ever changes the largest one."""
ROUTER_STD = 0.4
"""Large for the same reason: these are scores that choose a token's experts."""
CORRECTION_STD = 0.2
ROUTERS = ("mlp.gate.weight", "mlp.router.weight")

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_LATENT_SHAPE: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": MAX_POSITION_EMBEDDINGS // 8,
    },
}
_CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": 24, "head_dim": 32}),
    "qwen2": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": (Qwen3Config, {"head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "olmo2": (Olmo2Config, {}),
    "olmo3": (
        Olmo3Config,
        {
            "sliding_window": 20,
            "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 50000.0,
                    "factor": 8.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "attention_factor": 1.2,
                    "original_max_position_embeddings": MAX_POSITION_EMBEDDINGS // 8,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 50000.0},
            },
        },
    ),
    "smollm3": (SmolLM3Config, {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "granite": (
        GraniteConfig,
        {
            "attention_multiplier": 0.1,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 1.7,
        },
    ),
    "phi3": (Phi3Config, {"sliding_window": 30}),
    "gemma2": (
        Gemma2Config,
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 20,
            "attn_logit_softcapping": 6.0,
            "final_logit_softcapping": 25.0,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 40,
            "sliding_window": 20,
            "num_hidden_layers": 4,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "starcoder2": (Starcoder2Config, {"sliding_window": 36}),
    "gpt2": (GPT2Config, {}),
    "mixtral": (MixtralConfig, {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    "gpt_oss": (
        GptOssConfig,
        {
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 24,
            "swiglu_limit": 1.5,  # within what the small matrices reach
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": MAX_POSITION_EMBEDDINGS // 8,
            },
        },
    ),
    "deepseek_v2_lite": (
        DeepseekV2Config,
        {**_LATENT_SHAPE, "q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.0},
    ),
    "deepseek_v2": (
        DeepseekV2Config,
        {
            **_LATENT_SHAPE,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
        },
    ),
    "deepseek_v3": (DeepseekV3Config, {**_LATENT_SHAPE, "n_group": 4, "topk_group": 2}),
}


def make_checkpoint(
    path: Path, architecture: str, *, seed: int = 0, max_shard_size: str = "5GB", **changes: Any
) -> Path:
    """Write a random checkpoint to ``path``; ``changes`` override fields of the transformers config."""
    if architecture in TRANSFORMERS_FIELDS:
        config: PreTrainedConfig = AutoConfig.for_model(
            architecture, **{**_SHAPE, **TRANSFORMERS_FIELDS[architecture], **changes}
        )
    else:
        config_class, fields = _CONFIGS[architecture]
        config = config_class(**{**_SHAPE, **fields, **changes})
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model = model.to_empty(device="cpu").float()
    model.tie_weights()
    # A tied matrix is drawn as a head: as wide as an embedding it would only repeat the last token.
    embedding_std = HEAD_STD if config.tie_word_embeddings else EMBEDDING_STD
    if "gemma" in architecture:  # which multiplies embeddings with that
        embedding_std = EMBEDDING_STD / math.sqrt(config.hidden_size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = _draw(
                name, parameter.shape, generator, embedding_std=embedding_std, matrix_std=_matrix_std(architecture)
            )
            parameter.copy_(values)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(CORRECTION_STD * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path


def _draw(
    name: str, shape: torch.Size, generator: torch.Generator, *, embedding_std: float, matrix_std: float
) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")):
        return 1.0 + 0.1 * values
    if name.endswith("sinks"):
        return values
    if name.endswith(ROUTERS):
        return ROUTER_STD * values
    if "embed_tokens" in name or "wte" in name:
        return embedding_std * values
    return (HEAD_STD if "lm_head" in name else matrix_std) * values


def _matrix_std(architecture: str) -> float:
    """Larger if the head is tied to the embedding: otherwise the model would only repeat the last token."""
    return HEAD_STD if architecture in ("gemma2", "gemma3", "starcoder2", "gpt2") else MATRIX_STD


def load_oracle(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The checkpoint run by transformers, as the reference."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    assert isinstance(model, PreTrainedModel)
    return model.eval()


def oracle_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Logits of every position of one sequence, [num_tokens, vocab_size]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def oracle_greedy(model: PreTrainedModel, token_ids: list[int], num_tokens: int) -> list[int]:
    """The next ``num_tokens`` greedy tokens; end-of-sequence is ignored."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([token_ids]),
            attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [int(token) for token in output[0, len(token_ids) :]]


def edit_config(path: Path, **changes: Any) -> None:
    """Change fields of a checkpoint's config.json; a value of None removes the field."""
    file = path / "config.json"
    content = json.loads(file.read_text())
    for key, value in changes.items():
        if value is None:
            content.pop(key, None)
        else:
            content[key] = value
    file.write_text(json.dumps(content))
