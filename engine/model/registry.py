"""Which architectures can be loaded, and a checkpoint's shape by the one that it names. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from engine.contract.errors import CheckpointError
from engine.model.model_config import ModelConfig, read_config_json

ARCHITECTURES: Final = {
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "GPT2LMHeadModel": "gpt2",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Olmo2ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SmolLM3ForCausalLM": "smollm3",
    "Starcoder2ForCausalLM": "starcoder2",
}
"""What ``architectures`` in config.json may name, and the file in ``architectures/`` that knows it.

Such a file has ``read_config``, which turns the content of config.json into a ``ModelConfig`` or raises CheckpointError
for what it cannot serve; and, where the model is no plain ``Decoder``, a subclass of that by the name ``Model``. The
first line of its docstring is ``<family>: <what it is>``; ``CPU_ONLY``, if it has one, is what GPUs lack for its usual
checkpoints.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureFacts:
    """What is told of an architecture that can be loaded. cpu_only: what GPUs lack for it; None: it runs on both."""

    name: str
    family: str
    description: str
    cpu_only: str | None


def architectures() -> list[ArchitectureFacts]:
    """All that can be loaded, by family."""
    facts = []
    for name in ARCHITECTURES:
        module = architecture_module(name)
        family, _, description = (module.__doc__ or "").partition("\n")[0].partition(": ")
        facts.append(
            ArchitectureFacts(
                name=name,
                family=family,
                description=description.rstrip("."),
                cpu_only=getattr(module, "CPU_ONLY", None),
            )
        )
    return sorted(facts, key=lambda fact: fact.family)


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
