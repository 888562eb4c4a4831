"""gpt-oss as it is published: experts in four bits give the same results as in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from cluster.plan.sizing import ModelSize
from engine.contract.errors import CheckpointError
from engine.model.registry import load_model_config
from engine.model.weights.shards import SINGLE_FILE
from tests.support.engine.checkpoints import VOCAB_SIZE, load_oracle, make_checkpoint, oracle_logits
from tests.support.engine.model_harness import ModelHarness

MATRICES = ("gate_up_proj", "down_proj")
TOLERANCE = 1e-4


def _quantize(path: Path, plain: Path) -> None:
    """Give a checkpoint random experts in four bits, and the same numbers to ``plain``."""
    weights, same = load_file(path / SINGLE_FILE), load_file(plain / SINGLE_FILE)
    generator = torch.Generator().manual_seed(4)
    for name in [name for name in weights if name.endswith(MATRICES)]:
        num_experts, in_size, out_size = weights.pop(name).shape
        shape = num_experts, out_size, in_size // 32
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)
        weights[f"{name}_blocks"], weights[f"{name}_scales"] = blocks, scales
        same[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(weights, path / SINGLE_FILE, metadata={"format": "pt"})
    save_file(same, plain / SINGLE_FILE, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))


@pytest.fixture(name="checkpoints", scope="module")
def _checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One in four bits, and the same numbers in float32."""
    folder = tmp_path_factory.mktemp("mxfp4")
    path, plain = (make_checkpoint(folder / name, "gpt_oss") for name in ("mxfp4", "plain"))
    _quantize(path, plain)
    return path, plain


def test_experts_in_four_bits_are_the_numbers_that_transformers_makes_of_them(checkpoints: tuple[Path, Path]) -> None:
    _, plain = checkpoints
    tokens = torch.randint(VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    found = []
    for checkpoint in checkpoints:
        harness = ModelHarness(checkpoint)
        found.extend(harness.run((harness.start(tokens), len(tokens))))

    assert torch.equal(found[0], found[1])
    assert (found[0] - oracle_logits(load_oracle(plain), tokens)).abs().max().item() < TOLERANCE


def test_plan_counts_numbers_and_not_bytes(checkpoints: tuple[Path, Path]) -> None:
    path, plain = checkpoints

    assert ModelSize.of(path).num_parameters == ModelSize.of(plain).num_parameters
    assert load_model_config(path).experts != load_model_config(plain).experts


def test_experts_that_are_not_in_four_bits_as_the_config_says(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    path, plain = checkpoints
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    (tmp_path / SINGLE_FILE).write_bytes((plain / SINGLE_FILE).read_bytes())

    with pytest.raises(
        CheckpointError, match=r"mlp\.experts\.\w+, which does not belong to the architecture in config\.json"
    ):
        ModelHarness(tmp_path)
