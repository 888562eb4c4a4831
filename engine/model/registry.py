"""Which architectures can be loaded, and a checkpoint's shape by the one that it names. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from engine.contract.errors import CheckpointError
from engine.model.model_config import ModelConfig, read_config_json

ARCHITECTURES: Final = {
    "GptOssForCausalLM": "gpt_oss",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""What ``architectures`` in config.json may name, and the file in ``architectures/`` that knows it.

Such a file has ``read_config``, which turns the content of config.json into a ``ModelConfig`` or raises CheckpointError
for what it cannot serve; and, where the model is no plain ``Decoder``, a subclass of that by the name ``Model``.
"""


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
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            config: ModelConfig = architecture_module(name).read_config(raw, name)
            return config
    found = ", ".join(map(str, names)) or "none"
    raise CheckpointError(f"config.json: architecture {found} is not supported; supported: {', '.join(ARCHITECTURES)}")


def architecture_module(name: str) -> ModuleType:
    """The file of an architecture. Imported when it is asked for: one with a model of its own loads torch."""
    return import_module(f"engine.model.architectures.{ARCHITECTURES[name]}")
