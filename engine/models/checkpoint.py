"""A checkpoint's weights: where each tensor lies, loading them into place, and who they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError
from engine.models.model_config import ModelConfig, read_json_object

ProgressCallback = Callable[[int, int], None]
"""Called while weights load, with bytes done and bytes in all."""

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
NUM_HASH_SAMPLES = 64
HASH_SAMPLE_BYTES = 4096
MIN_BYTES_PER_WEIGHT = 2
COMPUTED_TENSOR_SUFFIX = "rotary_emb.inv_freq"
"""Old checkpoints store the rotary frequencies; they follow from config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One safetensors file. ``tensor_names`` None: all that it holds."""

    file: Path
    tensor_names: tuple[str, ...] | None

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.file.stat().st_size


def find_shards(path: Path) -> tuple[Shard, ...]:
    """The files that hold a checkpoint's weights, in the order of their names.

    Raises:
        CheckpointError: There are none, the index is broken, or one that it names is missing.
    """
    index_file = path / INDEX_FILE
    if index_file.is_file():
        return _indexed_shards(path, read_json_object(index_file))
    single = path / SINGLE_FILE
    if single.is_file():
        return (Shard(file=single, tensor_names=None),)
    raise CheckpointError(f"{path} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def _indexed_shards(path: Path, index: Mapping[str, Any]) -> tuple[Shard, ...]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX_FILE} has no weight_map")
    names_by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        names_by_file.setdefault(str(file), []).append(name)
    missing = sorted(file for file in names_by_file if not (path / file).is_file())
    if missing:
        raise CheckpointError(
            f"{path} is incomplete: {len(missing)} missing of {len(names_by_file)} shards, first {missing[0]}"
        )
    return tuple(Shard(file=path / file, tensor_names=tuple(names)) for file, names in sorted(names_by_file.items()))


def load_weights(path: Path, targets: Mapping[str, torch.Tensor], *, progress: ProgressCallback | None = None) -> None:
    """Copy every tensor of a checkpoint from the memory-mapped files straight into its place, converting the dtype.

    Raises:
        CheckpointError: A shard is missing or damaged, a tensor is missing, unexpected, or of another shape.
    """
    shards = find_shards(path)
    total_bytes = sum(shard.num_bytes for shard in shards)
    missing = set(targets)
    done_bytes = 0
    for shard in shards:
        try:
            with safe_open(shard.file, framework="pt") as tensors:
                for name in shard.tensor_names or tensors.keys():
                    done_bytes += _load_tensor(tensors, name, shard.file, targets)
                    missing.discard(name)
                    if progress is not None:
                        progress(min(done_bytes, total_bytes), total_bytes)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{shard.file} is damaged or truncated: {error}") from None
    if missing:
        raise CheckpointError(f"{path} is incomplete: {len(missing)} missing tensors, first {min(missing)}")
    if progress is not None:
        progress(total_bytes, total_bytes)


def _load_tensor(tensors: Any, name: str, file: Path, targets: Mapping[str, torch.Tensor]) -> int:
    """Load one tensor; returns its bytes."""
    if name.endswith(COMPUTED_TENSOR_SUFFIX):
        return 0
    target = targets.get(name)
    if target is None:
        raise CheckpointError(f"{file} holds tensor {name}, which config.json has no place for")
    source: torch.Tensor = tensors.get_tensor(name)
    if source.shape != target.shape:
        raise CheckpointError(
            f"{file}: tensor {name} has shape {list(source.shape)}, config.json asks for {list(target.shape)}"
        )
    if not source.is_floating_point() or source.element_size() < MIN_BYTES_PER_WEIGHT:
        raise CheckpointError(f"{file}: tensor {name} has dtype {source.dtype}; quantized weights are not supported")
    target.copy_(source)
    return source.nbytes


def has_tensor(path: Path, name: str) -> bool:
    """True when a checkpoint stores a tensor of that name.

    Raises:
        CheckpointError: A shard is missing or damaged.
    """
    for shard in find_shards(path):
        if shard.tensor_names is not None:
            if name in shard.tensor_names:
                return True
            continue
        try:
            with safe_open(shard.file, framework="pt") as tensors:
                return name in tensors.keys()  # noqa: SIM118  (not a mapping)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{shard.file} is damaged or truncated: {error}") from None
    return False


def model_hash(path: Path, config: ModelConfig) -> str:
    """A stable identity of a model's weights: two engines whose hashes are equal hold the same KV.

    Digests the shape, each shard's header (names, shapes, offsets) and size, and a sample of the weights' bytes
    spread over the file, so that it costs milliseconds for any size.

    Raises:
        CheckpointError: A shard is missing or damaged.
    """
    digest = hashlib.sha256(repr(config).encode())
    for shard in find_shards(path):
        size = shard.num_bytes
        with shard.file.open("rb") as file:
            header_bytes = min(int.from_bytes(file.read(8), "little"), size)
            digest.update(size.to_bytes(8, "little"))
            digest.update(file.read(header_bytes))
            first = 8 + header_bytes
            step = max((size - first) // NUM_HASH_SAMPLES, HASH_SAMPLE_BYTES)
            for offset in range(first, size, step):
                file.seek(offset)
                digest.update(file.read(HASH_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
