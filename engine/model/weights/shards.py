"""The files that hold a checkpoint's weights. Does not import torch, so that checking a checkpoint is fast."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.contract.checkpoint.json_file import read_json_object
from engine.contract.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Dtypes by their names in safetensors headers."""

NUM_SAMPLES = 64
SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One safetensors file. ``tensor_names``: the tensors to read from it; None: all."""

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


def weight_samples(path: Path) -> Iterator[bytes]:
    """Bytes that identify a checkpoint's weights, in milliseconds for any size: of each shard its size, its header
    (names, shapes, offsets), and bytes spread over the file.

    Raises:
        CheckpointError: A shard is missing.
    """
    for shard in find_shards(path):
        size = shard.num_bytes
        with shard.file.open("rb") as file:
            header_bytes = min(int.from_bytes(file.read(8), "little"), size)
            yield size.to_bytes(8, "little")
            yield file.read(header_bytes)
            first = 8 + header_bytes
            step = max((size - first) // NUM_SAMPLES, SAMPLE_BYTES)
            for offset in range(first, size, step):
                file.seek(offset)
                yield file.read(SAMPLE_BYTES)


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


def stored_dtype(path: Path) -> str | None:
    """The dtype of most numbers in a checkpoint's first file, by its header.

    Returns:
        None for a dtype that models do not run in, and for missing or unreadable files, which other checks report.
    """
    num_numbers: Counter[str] = Counter()
    with suppress(CheckpointError, SafetensorError, OSError):
        with safe_open(find_shards(path)[0].file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                part = tensors.get_slice(name)
                num_numbers[part.get_dtype()] += math.prod(part.get_shape())
        return DTYPE_NAMES.get(max(num_numbers, key=num_numbers.__getitem__, default=""))
    return None


def check_shards(path: Path) -> None:
    """Compare every shard's header with the file's size, without reading weights.

    Raises:
        CheckpointError: A shard is missing, damaged, or cut short.
    """
    for shard in find_shards(path):
        try:
            with shard.file.open("rb"), safe_open(shard.file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise shard_error(shard.file, error) from None


def shard_error(file: Path, error: SafetensorError | OSError) -> CheckpointError:
    """The error for a shard that could not be read: damaged content, or failed access."""
    if isinstance(error, OSError) and error.strerror:
        return CheckpointError(f"{file} cannot be read: {error.strerror}")
    return CheckpointError(f"{file} is damaged or truncated: {error}")
