"""Loads a checkpoint's weights into place, and identifies them by a hash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.contract.errors import CheckpointError
from engine.model.model_shape import ModelShape
from engine.model.weights.shards import find_shards, shard_error, weight_samples

ProgressCallback = Callable[[int, int], None]
"""Called while weights load, with bytes done and bytes in all."""

MIN_BYTES_PER_WEIGHT = 2
COMPUTED_TENSOR_SUFFIXES = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Tensors of old checkpoints that follow from config.json: rotary frequencies, and masks named like biases."""

BASE_MODEL_PREFIXES = ("", "model.", "transformer.")
"""Prefixes that tensor names may lack: some checkpoints were saved from the inner model, without the head."""


def load_weights(
    path: Path,
    targets: Mapping[str, torch.Tensor],
    *,
    ignored: tuple[str, ...] = (),
    progress: ProgressCallback | None = None,
) -> None:
    """Copy every tensor of a checkpoint from the memory-mapped files straight into its place, converting the dtype.

    ``ignored``: name prefixes of tensors without a place (``ModelShape.ignored_tensors``).

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
                    if name.startswith(ignored):
                        continue
                    full_name = next((p + name for p in BASE_MODEL_PREFIXES if p + name in targets), name)
                    done_bytes += _load_tensor(tensors, name, shard.file, targets.get(full_name))
                    missing.discard(full_name)
                    if progress is not None:
                        progress(min(done_bytes, total_bytes), total_bytes)
        except (SafetensorError, OSError) as error:
            raise shard_error(shard.file, error) from None
    if missing:
        raise CheckpointError(f"{path} is incomplete: {len(missing)} missing tensors, first {min(missing)}")
    if progress is not None:
        progress(total_bytes, total_bytes)


def _load_tensor(tensors: Any, name: str, file: Path, target: torch.Tensor | None) -> int:
    """Load one tensor; returns its bytes."""
    if target is None and name.endswith(COMPUTED_TENSOR_SUFFIXES):
        return 0
    if target is None:
        raise CheckpointError(f"{file} holds tensor {name}, which does not belong to the architecture in config.json")
    source: torch.Tensor = tensors.get_tensor(name)
    if source.shape != target.shape:
        raise CheckpointError(
            f"{file}: tensor {name} has shape {list(source.shape)}, config.json asks for {list(target.shape)}"
        )
    is_number = source.is_floating_point() and source.element_size() >= MIN_BYTES_PER_WEIGHT
    if source.dtype is not target.dtype and not (is_number and target.is_floating_point()):
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
            raise shard_error(shard.file, error) from None
    return False


def model_hash(path: Path, config: ModelShape) -> str:
    """A stable identity of a model's weights: engines with equal hashes compute the same KV.

    Digests the shape and the file samples of ``weight_samples``.

    Raises:
        CheckpointError: A shard is missing or damaged.
    """
    digest = hashlib.sha256(repr(config).encode())
    for piece in weight_samples(path):
        digest.update(piece)
    return digest.hexdigest()[:32]
