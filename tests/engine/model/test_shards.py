"""Error messages about a file of weights that cannot be read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from engine.contract.errors import CheckpointError
from engine.model.registry import load_model_config
from engine.model.weights.shards import check_shards, shard_error
from tests.support.engine.checkpoints import edit_config, make_checkpoint


def test_file_without_permission_is_not_called_damaged() -> None:
    error = PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    assert str(shard_error(Path("/m/model.safetensors"), error)) == (
        "/m/model.safetensors cannot be read: Permission denied"
    )


def test_broken_header_is_called_damaged() -> None:
    message = str(shard_error(Path("/m/model.safetensors"), SafetensorError("HeaderTooLarge")))

    assert message == "/m/model.safetensors is damaged or truncated: HeaderTooLarge"


def test_empty_file_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()

    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or truncated"):
        check_shards(tmp_path)


def test_incomplete_config_names_its_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4}')

    with pytest.raises(CheckpointError, match=f"{tmp_path}: config.json: num_hidden_layers is missing"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("architecture", ["llama", "arcee"])
@pytest.mark.parametrize(("stored", "expected"), [(torch.bfloat16, "bfloat16"), (torch.int8, "float32")])
def test_dtype_is_that_of_the_weights_where_config_json_names_none(
    tmp_path: Path, architecture: str, stored: torch.dtype, expected: str
) -> None:
    """A few weights are often of another one: norms, routers."""
    path = make_checkpoint(tmp_path, architecture)
    edit_config(path, dtype=None, torch_dtype=None)
    weights = {"norm": torch.zeros(4, dtype=torch.float16), "product": torch.zeros(4, 4, dtype=stored)}
    save_file(weights, path / "model.safetensors")

    shape = load_model_config(path)

    assert (shape.dtype, shape.cpu_dtype) == (expected, expected)


def test_dtype_that_config_json_names_goes_before_that_of_the_weights(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama")
    edit_config(path, dtype="float16", baton_cpu_dtype="float32")

    assert (load_model_config(path).dtype, load_model_config(path).cpu_dtype) == ("float16", "float32")

    edit_config(path, dtype=None)
    save_file({"product": torch.zeros(4, 4, dtype=torch.bfloat16)}, path / "model.safetensors")

    assert (load_model_config(path).dtype, load_model_config(path).cpu_dtype) == ("bfloat16", "float32")
