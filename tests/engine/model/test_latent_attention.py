"""Models that cache latents: their outputs, what is cached, what is not loaded, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.contract.errors import CheckpointError
from engine.model.latent_attention import HeadProducts
from engine.model.registry import load_model_config
from tests.support.engine.checkpoints import LATENT_FAMILIES, VOCAB_SIZE, edit_config, make_checkpoint
from tests.support.engine.model_harness import ModelHarness


def _tokens(num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(9)
    return [int(token) for token in torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator)]


def test_latents_are_all_that_is_cached(checkpoint: Callable[[str], Path]) -> None:
    config = load_model_config(checkpoint("deepseek_v3"))
    layout = ModelHarness(checkpoint("deepseek_v3")).cache.layout
    assert config.latent is not None
    assert config.latent.cached_size == 32 + 16
    assert layout.block_bytes == 3 * 16 * (32 + 16) * 4, "layers, tokens, numbers, bytes of each"


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_a_token_has_the_bits_that_it_has_among_others(checkpoint: Callable[[str], Path], family: str) -> None:
    harness, tokens = ModelHarness(checkpoint(family)), _tokens(60)
    alone, among = harness.start(tokens), harness.start(tokens)
    others = [harness.start(_tokens(40)) for _ in range(4)]
    (expected,) = harness.run((alone, 59))
    result, *_ = harness.run((among, 59), *((other, 30) for other in others))
    assert torch.equal(result, expected)
    (expected,) = harness.run((alone, 1))
    result, *_ = harness.run((among, 1), *((other, 1) for other in others))
    assert torch.equal(result, expected)


def test_products_of_a_few_tokens_have_the_bits_that_they_have_among_others() -> None:
    generator = torch.Generator().manual_seed(2)
    multiply = HeadProducts(torch.randn(16, 128, 96, generator=generator))
    x = torch.randn(40, 16, 128, generator=generator)
    together = multiply(x)
    for num_tokens in range(1, 10):
        assert torch.equal(together, torch.cat([multiply(part) for part in x.split(num_tokens)]))


@pytest.mark.parametrize("family", LATENT_FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 1.0), ("float16", 0.12)])
def test_half_precision_stays_near_float32(
    checkpoint: Callable[[str], Path], family: str, dtype: str, tolerance: float
) -> None:
    tokens = _tokens(80)
    results = []
    for harness in (ModelHarness(checkpoint(family)), ModelHarness(checkpoint(family), dtype=dtype)):
        sequence = harness.start(tokens)
        results.append(torch.cat([logits for count in (50, 27, 1, 1, 1) for logits in harness.run((sequence, count))]))
    assert (results[1] - results[0]).abs().quantile(0.9).item() < tolerance


def test_layers_that_draft_are_not_loaded(tmp_path: Path) -> None:
    """The published checkpoints of V3 have one such layer, after the last."""
    path = make_checkpoint(tmp_path, "deepseek_v3")
    tokens = _tokens(30)
    harness = ModelHarness(path)
    (expected,) = harness.run((harness.start(tokens), 30))
    weights = load_file(path / "model.safetensors")
    weights["model.layers.3.enorm.weight"] = torch.ones(64)
    save_file(weights, path / "model.safetensors")
    edit_config(path, num_nextn_predict_layers=1)
    harness = ModelHarness(path)
    (logits,) = harness.run((harness.start(tokens), 30))
    assert torch.equal(logits, expected)
    edit_config(path, num_nextn_predict_layers=0)
    with pytest.raises(
        CheckpointError,
        match=r"model\.layers\.3\.enorm\.weight, which does not belong to the architecture in config\.json",
    ):
        ModelHarness(path)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "weights in FP8": (
        "deepseek_v3",
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        "FP8 are not supported; convert the checkpoint to bfloat16",
    ),
    "other quantized weights": ("deepseek_v2", {"quantization_config": {"quant_method": "awq"}}, r"\(awq\)"),
    "an unknown choice": ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
    "other scores": ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
    "weights of V2 that add up to one": ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True"),
    "experts in every other layer": ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
    "groups that do not divide the experts": ("deepseek_v3", {"n_group": 3}, "8 experts in n_group 3"),
    "too few open groups": ("deepseek_v3", {"topk_group": 1}, "no num_experts_per_tok 3 to choose"),
    "an odd rotation": ("deepseek_v2", {"qk_rope_head_dim": 15}, "qk_rope_head_dim 15 is odd"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(tmp_path: Path, checkpoint: Callable[[str], Path], name: str) -> None:
    family, changes, message = REFUSED[name]
    (tmp_path / "config.json").write_text((checkpoint(family) / "config.json").read_text())
    edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model_config(tmp_path)


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_first_layers_without_experts(checkpoint: Callable[[str], Path], family: str) -> None:
    config = load_model_config(checkpoint(family))
    assert [spec is None for spec in config.experts] == [True, False, False]
    assert all(spec is None or (spec.shared_size, spec.num_active) == (96, 3) for spec in config.experts)
    assert dataclasses.replace(config, experts=()).mlp_size == 2 * config.intermediate_size
