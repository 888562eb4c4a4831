"""Broken checkpoints are refused in one clear line each; good ones load from any number of shards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.contract.errors import CheckpointError
from engine.model.decoder import Decoder
from engine.model.registry import load_model_config
from engine.model.weights.checkpoint import load_weights, model_hash
from engine.model.weights.shards import INDEX_FILE, SINGLE_FILE, find_shards
from tests.support.engine.checkpoints import MIXTURES, edit_config, make_checkpoint

HEAD = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(name="sharded", scope="module")
def _sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("sharded"), "llama", max_shard_size="100KB")
    assert len(find_shards(path)) > 2
    return path


@pytest.fixture(name="copy")
def _copy(tmp_path: Path) -> Callable[[Path], Path]:
    def copy(path: Path) -> Path:
        return Path(shutil.copytree(path, tmp_path / "copy"))

    return copy


def _decoder(path: Path) -> Decoder:
    return Decoder(load_model_config(path), max_positions=8, dtype=torch.float32, device=torch.device("cpu"))


def _load(path: Path) -> dict[str, torch.Tensor]:
    targets = _decoder(path).targets()
    load_weights(path, targets)
    return targets


def _refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        _load(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("architecture", ("qwen3", *MIXTURES))
def test_every_tensor_lands_in_its_place(checkpoint: Callable[[str], Path], architecture: str) -> None:
    stored = load_file(checkpoint(architecture) / SINGLE_FILE)
    loaded = _load(checkpoint(architecture))
    assert loaded.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("architecture", ("llama", "mixtral", "gpt_oss"))
def test_shards_load_like_one_file(checkpoint: Callable[[str], Path], tmp_path: Path, architecture: str) -> None:
    single = _load(checkpoint(architecture))
    parts = _load(make_checkpoint(tmp_path, architecture, max_shard_size="100KB"))
    assert len(find_shards(tmp_path)) > 2
    assert all(torch.equal(parts[name], tensor) for name, tensor in single.items())


def test_weights_are_converted_to_the_dtype_asked_for(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    weights = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / SINGLE_FILE).items()}
    save_file(weights, tmp_path / SINGLE_FILE)
    loaded = _load(tmp_path)
    assert all(torch.equal(loaded[name], tensor.float()) for name, tensor in weights.items())


def test_progress_grows_to_the_whole(sharded: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_weights(sharded, _decoder(sharded).targets(), progress=lambda done, total: seen.append((done, total)))
    done = [entry[0] for entry in seen]
    assert done == sorted(done)
    assert seen[-1][0] == seen[-1][1] == sum(shard.num_bytes for shard in find_shards(sharded))
    assert len(seen) > len(find_shards(sharded))


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a directory"):
        load_model_config(tmp_path / "nowhere")


def test_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: it has no config\.json"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_config_that_is_no_json_object(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json (cannot be read as JSON|does not contain a JSON object)"):
        load_model_config(tmp_path)


def test_no_weights(sharded: Path, tmp_path: Path) -> None:
    shutil.copy(sharded / "config.json", tmp_path)
    assert "has no weights" in _refused(tmp_path)


def test_a_missing_shard(sharded: Path, copy: Callable[[Path], Path]) -> None:
    path = copy(sharded)
    gone = find_shards(path)[1].file
    gone.unlink()
    assert gone.name in _refused(path)


@pytest.mark.parametrize("size", [0, 7, 500, 90_000])
def test_a_truncated_shard(sharded: Path, copy: Callable[[Path], Path], size: int) -> None:
    path = copy(sharded)
    shard = find_shards(path)[0].file
    with shard.open("r+b") as file:
        file.truncate(size)
    message = _refused(path)
    assert shard.name in message
    assert "truncated" in message


def test_a_tensor_that_the_index_names_and_the_shard_lacks(sharded: Path, copy: Callable[[Path], Path]) -> None:
    path = copy(sharded)
    index = json.loads((path / INDEX_FILE).read_text())
    weights = load_file(path / index["weight_map"][HEAD])
    del weights[HEAD]
    save_file(weights, path / index["weight_map"][HEAD])
    assert HEAD in _refused(path)


def test_an_index_without_a_map(sharded: Path, copy: Callable[[Path], Path]) -> None:
    path = copy(sharded)
    (path / INDEX_FILE).write_text("{}")
    assert "has no weight_map" in _refused(path)


def _change_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(path / SINGLE_FILE)
    change(weights)
    save_file(weights, path / SINGLE_FILE)


def test_a_missing_tensor(checkpoint: Callable[[str], Path], copy: Callable[[Path], Path]) -> None:
    path = copy(checkpoint("llama"))
    _change_weights(path, lambda weights: weights.pop(HEAD))
    message = _refused(path)
    assert "1 missing tensors" in message
    assert HEAD in message


def test_a_tensor_of_another_shape(checkpoint: Callable[[str], Path], copy: Callable[[Path], Path]) -> None:
    path = copy(checkpoint("llama"))
    _change_weights(path, lambda weights: weights.update({HEAD: torch.zeros(64, 95)}))
    assert f"{HEAD} has shape [64, 95], config.json asks for [64, 96]" in _refused(path)


def test_a_tensor_without_a_place(checkpoint: Callable[[str], Path], copy: Callable[[Path], Path]) -> None:
    """A bias that the config does not mention would be ignored silently, and every answer would be wrong."""
    path = copy(checkpoint("llama"))
    name = "model.layers.0.self_attn.q_proj.bias"
    _change_weights(path, lambda weights: weights.update({name: torch.zeros(64)}))
    assert name in _refused(path)


def test_quantized_weights(checkpoint: Callable[[str], Path], copy: Callable[[Path], Path]) -> None:
    path = copy(checkpoint("llama"))
    _change_weights(path, lambda weights: weights.update({HEAD: weights[HEAD].to(torch.int8)}))
    assert "quantized weights are not supported" in _refused(path)


def test_the_hash_knows_the_weights_and_not_the_place(sharded: Path, copy: Callable[[Path], Path]) -> None:
    path = copy(sharded)
    config = load_model_config(path)
    assert model_hash(path, config) == model_hash(sharded, config)
    shard = find_shards(path)[-1].file
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert model_hash(path, config) != model_hash(sharded, config)


def test_the_hash_knows_the_shape(checkpoint: Callable[[str], Path], copy: Callable[[Path], Path]) -> None:
    path = copy(checkpoint("llama"))
    before = model_hash(path, load_model_config(path))
    edit_config(path, rms_norm_eps=1e-3)
    assert model_hash(path, load_model_config(path)) != before
