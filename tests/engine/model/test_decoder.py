"""The decoder computes the same as transformers, in whatever pieces a sequence is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engine.checkpoints import (
    ARCHITECTURES,
    MAX_POSITION_EMBEDDINGS,
    VOCAB_SIZE,
    edit_config,
    load_oracle,
    make_checkpoint,
    oracle_logits,
)
from tests.support.engine.model_harness import ModelHarness

TOLERANCE = 1e-4

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn, tuned": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn, given factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.3,
    },
}


def _tokens(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator)]


def _assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).abs().max().item() < TOLERANCE


def _assert_says_the_same(path: Path, num_tokens: int) -> None:
    harness = ModelHarness(path)
    tokens = _tokens(num_tokens)
    (logits,) = harness.run((harness.start(tokens), num_tokens))
    _assert_same(logits, oracle_logits(load_oracle(path), tokens))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("num_tokens", [1, 17, 600])
def test_logits_of_a_whole_prompt(checkpoint: Callable[[str], Path], architecture: str, num_tokens: int) -> None:
    _assert_says_the_same(checkpoint(architecture), num_tokens)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("block_size", [3, 16])
def test_logits_in_chunks_then_token_by_token(
    checkpoint: Callable[[str], Path], architecture: str, block_size: int
) -> None:
    harness = ModelHarness(checkpoint(architecture), block_size=block_size)
    tokens = _tokens(120)
    sequence = harness.start(tokens)
    parts = [logits for count in (3, 40, 1, 57, 6, *[1] * 13) for logits in harness.run((sequence, count))]
    _assert_same(torch.cat(parts), oracle_logits(load_oracle(checkpoint(architecture)), tokens))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_in_a_batch_of_chunks_and_decodes(checkpoint: Callable[[str], Path], architecture: str) -> None:
    harness = ModelHarness(checkpoint(architecture))
    oracle = load_oracle(checkpoint(architecture))
    prompts = [_tokens(length, seed) for seed, length in enumerate((90, 33, 5, 260))]
    sequences = [harness.start(tokens) for tokens in prompts]
    first = harness.run((sequences[0], 88), (sequences[1], 16), (sequences[3], 100))
    second = harness.run((sequences[2], 5), (sequences[0], 1), (sequences[3], 160), (sequences[1], 17))
    third = harness.run((sequences[0], 1))
    expected = [oracle_logits(oracle, tokens) for tokens in prompts]
    _assert_same(torch.cat((first[0], second[1], third[0])), expected[0])
    _assert_same(torch.cat((first[1], second[3])), expected[1])
    _assert_same(second[0], expected[2])
    _assert_same(torch.cat((first[2], second[2])), expected[3])


@pytest.mark.parametrize("name", ROPES)
def test_rope_scalings(tmp_path: Path, name: str) -> None:
    path = make_checkpoint(tmp_path, "llama", rope_parameters={"rope_theta": 10000.0, **ROPES[name]})
    _assert_says_the_same(path, 200)


@pytest.mark.parametrize("name", ROPES)
def test_rope_scalings_under_the_old_keys_mean_the_same(tmp_path: Path, name: str) -> None:
    path = make_checkpoint(tmp_path, "qwen3", rope_parameters={"rope_theta": 50000.0, **ROPES[name]})
    harness, tokens = ModelHarness(path), _tokens(50)
    (expected,) = harness.run((harness.start(tokens), 50))
    old = dict(ROPES[name])
    old["type"] = old.pop("rope_type")
    edit_config(path, rope_parameters=None, rope_theta=50000.0, rope_scaling=old)
    harness = ModelHarness(path)
    (logits,) = harness.run((harness.start(tokens), 50))
    assert torch.equal(logits, expected)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with every bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama without groups": ("llama", {"num_key_value_heads": 4}),
    "llama with one key head": ("llama", {"num_key_value_heads": 1}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen2 without a window": ("qwen2", {"use_sliding_window": False}),
    "qwen2 with a window in named layers": (
        "qwen2",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen2 untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3 with a window": ("qwen3", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
    "qwen3 with attention bias": ("qwen3", {"attention_bias": True}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "mixtral with a window and one expert a token": ("mixtral", {"sliding_window": 24, "num_experts_per_tok": 1}),
    "qwen3_moe with a window, weights that add up to one and biases": (
        "qwen3_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "norm_topk_prob": True,
            "attention_bias": True,
            "decoder_sparse_step": 2,
        },
    ),
    "gpt_oss without windows or biases of attention, all experts a token": (
        "gpt_oss",
        {"layer_types": ["full_attention"] * 3, "attention_bias": False, "num_experts_per_tok": 6},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_the_architectures(tmp_path: Path, name: str) -> None:
    architecture, changes = VARIANTS[name]
    _assert_says_the_same(make_checkpoint(tmp_path, architecture, **changes), 100)


def test_a_stored_head_counts_although_the_config_calls_it_tied(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama")
    harness, tokens = ModelHarness(path), _tokens(20)
    (expected,) = harness.run((harness.start(tokens), 20))
    edit_config(path, tie_word_embeddings=True)
    harness = ModelHarness(path)
    (logits,) = harness.run((harness.start(tokens), 20))
    assert torch.equal(logits, expected)


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama")
    weights = load_file(path / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(weights, path / "model.safetensors")
    _assert_says_the_same(path, 20)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.6), ("float16", 0.08)])
def test_half_precision_stays_near_float32(
    checkpoint: Callable[[str], Path], architecture: str, dtype: str, tolerance: float
) -> None:
    """The error is bounded by a few roundings of logits of about 10: 8 bits in bfloat16, 11 in float16."""
    harness = ModelHarness(checkpoint(architecture), dtype=dtype)
    tokens = _tokens(150)
    sequence = harness.start(tokens)
    parts = [logits for count in (70, 40, 36, 1, 1, 1, 1) for logits in harness.run((sequence, count))]
    expected = oracle_logits(load_oracle(checkpoint(architecture)), tokens)
    error = (torch.cat(parts) - expected).abs()
    assert error.mean().item() < tolerance / 4
    assert error.quantile(0.99).item() < tolerance


def test_the_longest_position_can_be_computed(checkpoint: Callable[[str], Path]) -> None:
    _assert_says_the_same(checkpoint("mistral"), MAX_POSITION_EMBEDDINGS)
