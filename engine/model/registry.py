"""The architectures that can be loaded, and how a checkpoint's shape is read. Does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from engine.contract.config import ModelCode
from engine.contract.errors import CheckpointError
from engine.model.model_config import ModelConfig, names_dtype, read_config_json, read_cpu_dtype
from engine.model.model_shape import ModelShape
from engine.model.weights.shards import stored_dtype

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
    "Olmo3ForCausalLM": "olmo3",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SmolLM3ForCausalLM": "smollm3",
    "Starcoder2ForCausalLM": "starcoder2",
}
"""The values of ``architectures`` in config.json, each with the file in ``architectures/`` that reads it.

Such a file has ``read_config``. It turns the content of config.json into a ``ModelConfig``, or raises CheckpointError
for what it cannot serve. If the model is no plain ``Decoder``, the file also has a subclass of it called ``Model``. The
first line of the file's docstring is ``<family>: <what it is>``. ``CPU_ONLY``, if present, says what GPUs lack for the
usual checkpoints.
"""


ANY_CODE: Final = ModelCode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureFacts:
    """What is reported about a loadable architecture. cpu_only: what GPUs lack for it; None: it runs on both."""

    name: str
    family: str
    description: str
    cpu_only: str | None


def architectures() -> list[ArchitectureFacts]:
    """All loadable architectures, by family."""
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


def load_model_config(path: Path, code: ModelCode = ANY_CODE) -> ModelShape:
    """Read and check the shape of a checkpoint, as seen by the code that will compute it.

    If config.json names no dtype, that of the weights is taken.

    Raises:
        CheckpointError: Not a checkpoint, or one of a kind that is not supported; the message lists what is.
    """
    raw = read_config_json(path)
    try:
        if code.impl == "native" or (code.impl == "auto" and is_native(raw)):
            shape: ModelShape = parse_model_config(raw)
        else:
            shape = _read_by_transformers(path, raw, trust_remote_code=code.trust_remote_code)
        if names_dtype(raw) or (stored := stored_dtype(path)) is None:
            return shape
        return dataclasses.replace(shape, dtype=stored, cpu_dtype=read_cpu_dtype({**raw, "dtype": stored}))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def is_native(raw: Mapping[str, Any]) -> bool:
    """True if config.json names an architecture that Baton computes itself."""
    return any(name in ARCHITECTURES for name in raw.get("architectures") or [])


def _read_by_transformers(path: Path, raw: Mapping[str, Any], *, trust_remote_code: bool) -> ModelShape:
    unknown = "" if is_native(raw) else f"{_unknown(raw)}. "
    if find_spec("transformers") is None:
        raise CheckpointError(
            f"{unknown}Transformers, which supports others, is not installed: pip install baton-serve[transformers]"
        )
    from engine.model.transformers_backend.config import read_config  # imported late: an optional dependency

    try:
        return read_config(path, trust_remote_code=trust_remote_code)
    except CheckpointError as error:
        raise CheckpointError(f"{unknown}With transformers' code: {error}") from error


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
    raise CheckpointError(_unknown(raw))


def _unknown(raw: Mapping[str, Any]) -> str:
    found = ", ".join(map(str, raw.get("architectures") or [])) or "none"
    return f"config.json: architecture {found} is not supported natively; supported: {', '.join(ARCHITECTURES)}"


def architecture_module(name: str) -> ModuleType:
    """The file of an architecture, imported on demand, since files with a ``Model`` load torch."""
    return import_module(f"engine.model.architectures.{ARCHITECTURES[name]}")
