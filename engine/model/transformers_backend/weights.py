"""Loads a checkpoint's weights into a transformers model, which may rename, merge and transpose them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine.contract.errors import CheckpointError
from engine.model.weights.checkpoint import ProgressCallback
from engine.model.weights.shards import find_shards, shard_error

NUMBER_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number, by safetensors' name for its type."""

MASKS_IN_CHECKPOINTS: Final = ("attention.bias", "attn.bias", "masked_bias")
"""Masks that old checkpoints store as tensors; transformers ignores them."""


class StoredTensor:
    """A tensor in a file that is read on demand; transformers accepts it in place of a tensor."""

    def __init__(self, stored: Any, num_bytes: int, count: Callable[[int], None]) -> None:
        self._stored, self._num_bytes, self._count = stored, num_bytes, count

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._stored[index]
        self._count(self._num_bytes)
        return tensor


def load_weights(
    path: Path,
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    progress: ProgressCallback | None,
) -> PreTrainedModel:
    """A model with its weights in main memory. Each weight is read from its file when its place is filled.

    Raises:
        CheckpointError: A shard is missing or damaged, a tensor is missing, unexpected, or of another shape or type.
    """
    with ExitStack() as files:
        tensors = _open(path, files, progress)
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            loaded: Any = model_class.from_pretrained(
                None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True
            )
        except Exception as error:  # from its conversions or its own code, which may raise anything
            raise CheckpointError(f"{path}: its weights do not fit: {error}") from error
    model, info = loaded
    _check(path, info)
    assert isinstance(model, PreTrainedModel)
    model.train(False)
    model.requires_grad_(False)
    return model


def leave_files(model: nn.Module) -> None:
    """Copy the tensors that still refer to memory-mapped files: one such tensor keeps a whole file in memory."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            tensor.data = tensor.data.clone()


def _open(path: Path, files: ExitStack, progress: ProgressCallback | None) -> dict[str, StoredTensor]:
    shards = find_shards(path)
    total_bytes = sum(shard.num_bytes for shard in shards)
    done_bytes = 0

    def count(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        if progress is not None:
            progress(min(done_bytes, total_bytes), total_bytes)

    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        try:
            file = files.enter_context(safe_open(shard.file, framework="pt"))
            for name in shard.tensor_names or file.keys():
                stored = file.get_slice(name)
                tensors[name] = StoredTensor(stored, _num_bytes(name, stored, shard.file), count)
        except (SafetensorError, OSError) as error:
            raise shard_error(shard.file, error) from None
    return tensors


def _num_bytes(name: str, stored: Any, file: Path) -> int:
    dtype = stored.get_dtype()
    if dtype not in NUMBER_BYTES and not name.endswith(MASKS_IN_CHECKPOINTS):
        raise CheckpointError(f"{file}: tensor {name} has dtype {dtype}; quantized weights are not supported")
    num_elements: int = math.prod(stored.get_shape())
    return num_elements * NUMBER_BYTES.get(dtype, 1)


def _check(path: Path, info: dict[str, Any]) -> None:
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if missing:
        raise CheckpointError(f"{path} is incomplete: {len(missing)} missing tensors, first {missing[0]}")
    if unexpected:
        raise CheckpointError(
            f"{path} holds tensor {unexpected[0]}, which does not belong to the architecture in config.json"
        )
    if info["mismatched_keys"]:
        raise CheckpointError(f"{path}: tensors of other shapes than config.json asks for: {info['mismatched_keys']}")
