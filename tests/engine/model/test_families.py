"""Architectures that differ from Llama compute the same as transformers, in whatever pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.weights.shards import find_shards
from tests.support.engine.checkpoints import (
    FAMILIES,
    VOCAB_SIZE,
    edit_config,
    load_oracle,
    make_checkpoint,
    oracle_logits,
)
from tests.support.engine.model_harness import ModelHarness

TOLERANCE = 1e-4
NUM_TOKENS = 121


def _tokens(num_tokens: int = NUM_TOKENS) -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return [int(token) for token in torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator)]


def _assert_says_the_same(path: Path, *, num_tokens: int = NUM_TOKENS, max_model_len: int | None = None) -> None:
    """A whole prompt, and the same in chunks and then token by token."""
    expected = oracle_logits(load_oracle(path), _tokens(num_tokens))
    harness = ModelHarness(path, block_size=7, max_model_len=max_model_len)
    (whole,) = harness.run((harness.start(_tokens(num_tokens)), num_tokens))
    sequence = harness.start(_tokens(num_tokens))
    parts = [logits for count in (3, 40, num_tokens - 49, *[1] * 6) for logits in harness.run((sequence, count))]
    assert (whole - expected).abs().max().item() < TOLERANCE
    assert (torch.cat(parts) - expected).abs().max().item() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_sharded_checkpoint(tmp_path: Path, family: str) -> None:
    path = make_checkpoint(tmp_path, family, max_shard_size="100KB")
    assert len(find_shards(path)) > 2
    _assert_says_the_same(path)


ORIGINAL_LENGTH = 64


def _longrope(num_pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.05 * pair for pair in range(num_pairs)],
        "long_factor": [1.5 + 0.4 * pair for pair in range(num_pairs)],
    }


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2 with biases": ("olmo2", {"attention_bias": True}),
    "olmo3 with biases, unscaled": ("olmo3", {"attention_bias": True, "rope_parameters": None}),
    "olmo3 with named layers": (
        "olmo3",
        {"layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "smollm3 with windows where it does not rotate": ("smollm3", {"use_sliding_window": True, "sliding_window": 20}),
    "smollm3 with named layers": ("smollm3", {"no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True}),
    "granite with biases, tied": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "phi3 rotated in part": ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}}),
    "gemma2 without caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 800},
    ),
    "gemma2 with biases, untied": ("gemma2", {"attention_bias": True, "tie_word_embeddings": False}),
    "gemma3 with a cap on logits": ("gemma3", {"final_logit_softcapping": 9.0}),
    "starcoder2 without biases, untied": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "starcoder2 without a window": ("starcoder2", {"sliding_window": None}),
    "gpt2 with scores of its own": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}),
    "deepseek_v2 of two groups, one open, with biases": (
        "deepseek_v2",
        {"n_group": 2, "topk_group": 1, "attention_bias": True, "mlp_bias": True},
    ),
    "deepseek_v2_lite with biases, experts in every layer": (
        "deepseek_v2_lite",
        {"attention_bias": True, "first_k_dense_replace": 0, "n_shared_experts": 1},
    ),
    "deepseek_v3 without groups, without yarn, heads of values wider than those of keys": (
        "deepseek_v3",
        {"n_group": 1, "topk_group": 1, "v_head_dim": 48, "rope_parameters": {"rope_type": "default"}},
    ),
    "deepseek_v3 with pairs in halves, weights as they are, queries of the hidden state": (
        "deepseek_v3",
        {"rope_interleave": False, "norm_topk_prob": False, "q_lora_rank": None},
    ),
    "deepseek_v3 with more heads than go through a latent together": (
        "deepseek_v3",
        {"num_attention_heads": 12, "num_key_value_heads": 12},
    ),
    "gpt2 narrow": ("gpt2", {"n_inner": 72, "n_positions": 128}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(tmp_path: Path, name: str) -> None:
    family, changes = VARIANTS[name]
    _assert_says_the_same(make_checkpoint(tmp_path, family, **changes))


@pytest.mark.parametrize("partial", [1.0, 0.75])
def test_longrope_of_sequences_up_to_the_original_length_and_of_longer_ones(tmp_path: Path, partial: float) -> None:
    rope = {**_longrope(int(16 * partial) // 2), "partial_rotary_factor": partial}
    path = make_checkpoint(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=ORIGINAL_LENGTH)
    _assert_says_the_same(path)
    _assert_says_the_same(path, num_tokens=ORIGINAL_LENGTH, max_model_len=ORIGINAL_LENGTH)


@pytest.mark.parametrize("older", ["su", "yarn"])
def test_longrope_under_the_older_keys_means_the_same(tmp_path: Path, older: str) -> None:
    path = make_checkpoint(
        tmp_path, "phi3", rope_parameters=_longrope(8), original_max_position_embeddings=ORIGINAL_LENGTH
    )
    harness, tokens = ModelHarness(path), _tokens()
    (expected,) = harness.run((harness.start(tokens), NUM_TOKENS))
    old = _longrope(8)
    edit_config(
        path,
        rope_parameters=None,
        rope_theta=old.pop("rope_theta"),
        rope_scaling={**old, "rope_type": None, "type": older},
    )
    harness = ModelHarness(path)
    (logits,) = harness.run((harness.start(tokens), NUM_TOKENS))
    assert torch.equal(logits, expected)


def test_rotations_of_gemma3_under_the_older_keys_mean_the_same(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "gemma3")
    harness, tokens = ModelHarness(path), _tokens()
    (expected,) = harness.run((harness.start(tokens), NUM_TOKENS))
    edit_config(
        path,
        rope_parameters=None,
        layer_types=None,
        sliding_window_pattern=3,
        rope_theta=50000.0,
        rope_local_base_freq=1000.0,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
    )
    harness = ModelHarness(path)
    (logits,) = harness.run((harness.start(tokens), NUM_TOKENS))
    assert torch.equal(logits, expected)


def test_rotations_of_olmo3_under_the_older_keys_mean_the_same(tmp_path: Path) -> None:
    """As it was published: the scaling is that of the layers that see everything."""
    path = make_checkpoint(tmp_path, "olmo3")
    harness, tokens = ModelHarness(path), _tokens()
    (expected,) = harness.run((harness.start(tokens), NUM_TOKENS))
    scaling = json.loads((path / "config.json").read_text())["rope_parameters"]["full_attention"]
    edit_config(
        path, rope_parameters=None, layer_types=None, rope_theta=scaling.pop("rope_theta"), rope_scaling=scaling
    )
    harness = ModelHarness(path)
    (logits,) = harness.run((harness.start(tokens), NUM_TOKENS))
    assert torch.equal(logits, expected)


def test_gpt2_as_it_was_first_published(tmp_path: Path) -> None:
    """Saved from the model without its head, with the masks of its attention."""
    path = make_checkpoint(tmp_path, "gpt2")
    weights = load_file(path / "model.safetensors")
    stored = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    stored |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8).tril(), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    harness, tokens = ModelHarness(path), _tokens()
    (expected,) = harness.run((harness.start(tokens), NUM_TOKENS))
    save_file(stored, path / "model.safetensors")
    harness = ModelHarness(path)
    (logits,) = harness.run((harness.start(tokens), NUM_TOKENS))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("family", ["olmo2", "olmo3", "gemma3", "gpt2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.6), ("float16", 0.08)])
def test_half_precision_stays_near_float32(tmp_path: Path, family: str, dtype: str, tolerance: float) -> None:
    path = make_checkpoint(tmp_path, family)
    harness = ModelHarness(path, dtype=dtype)
    sequence = harness.start(_tokens())
    parts = [logits for count in (70, 47, 1, 1, 1, 1) for logits in harness.run((sequence, count))]
    error = (torch.cat(parts) - oracle_logits(load_oracle(path), _tokens())).abs()
    assert error.mean().item() < tolerance / 4
    assert error.quantile(0.99).item() < tolerance
