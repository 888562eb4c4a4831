"""Which architectures can be loaded, and a checkpoint's shape by the one that it names. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.contract.errors import CheckpointError
from engine.model.architectures import llama, mistral, qwen2, qwen3
from engine.model.model_config import ModelConfig, read_config_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How checkpoints of one kind are read.

    name: as ``architectures`` in config.json names it.
    read_config: from the content of config.json to a model's shape; raises CheckpointError for what it cannot serve.
    """

    name: str
    read_config: Callable[[Mapping[str, Any]], ModelConfig]


ARCHITECTURES: Final = {
    module.NAME: Architecture(name=module.NAME, read_config=module.read_config)
    for module in (llama, mistral, qwen2, qwen3)
}
"""A new architecture is a file in ``architectures/`` and an entry here."""


def load_model_config(path: Path) -> ModelConfig:
    """Read and check the shape of a checkpoint.

    Raises:
        CheckpointError: Not a checkpoint, or one of a kind that is not supported; the message lists what is.
    """
    raw = read_config_json(path)
    try:
        return parse_model_config(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Check the content of a config.json and turn it into a ``ModelConfig``.

    Raises:
        CheckpointError: As ``load_model_config``.
    """
    return _find_architecture(raw).read_config(raw)


def _find_architecture(raw: Mapping[str, Any]) -> Architecture:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    found = ", ".join(map(str, names)) or "none"
    raise CheckpointError(f"config.json: architecture {found} is not supported; supported: {', '.join(ARCHITECTURES)}")
