"""What is said of a file of weights that cannot be read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from engine.contract.errors import CheckpointError
from engine.model.registry import load_model_config
from engine.model.weights.shards import check_shards, shard_error


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
