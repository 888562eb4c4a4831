"""Refuses checkpoints whose config shows that paged attention cannot serve them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from transformers import CONFIG_MAPPING, PreTrainedConfig

from engine.contract.errors import CheckpointError

KNOWN_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
"""Values of ``layer_types`` in config.json whose layers attend over keys and values in blocks."""

LENGTH_DEPENDENT_ROPES: Final = frozenset({"dynamic", "longrope"})
"""In transformers these switch the whole batch to other frequencies once one of its sequences is long."""


def check_raw_config(raw: Mapping[str, Any], *, trust_remote_code: bool) -> None:
    """Refuse what can be seen without parsing the config.

    If transformers knows the ``model_type``, the code in a checkpoint is not needed: models are often published with
    code before transformers supports them. Then transformers' code runs, unless the checkpoint's is trusted.

    Raises:
        CheckpointError: It needs code of its own that is not trusted, or its weights are quantized.
    """
    model_type = raw.get("model_type")
    if raw.get("auto_map") and not trust_remote_code and model_type not in CONFIG_MAPPING:
        raise CheckpointError(
            f"config.json: transformers has no model_type {model_type}, and auto_map names code that comes with the "
            "checkpoint, which runs only with trust_remote_code"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(f"config.json: quantized weights ({method}) are not supported")


def check_config(config: PreTrainedConfig, path: Path) -> None:
    """Refuse what a parsed config shows.

    Raises:
        CheckpointError: It is not a text decoder, has layers without attention, or its rotations depend on the batch.
    """
    if config.is_encoder_decoder:
        raise CheckpointError("config.json: models with an encoder and a decoder are not supported")
    if config.get_text_config() is not config:
        parts = ", ".join(sorted(config.sub_configs))
        raise CheckpointError(f"config.json: models of several parts ({parts}) are not supported, only those of text")
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYER_TYPES)
    if unknown:
        raise CheckpointError(
            f"config.json: layer_types {', '.join(unknown)} are not supported; supported: "
            f"{', '.join(sorted(KNOWN_LAYER_TYPES))}"
        )
    for rope_type in _rope_types(config):
        if rope_type in LENGTH_DEPENDENT_ROPES:
            raise CheckpointError(
                f"config.json: rope_type {rope_type} is not supported by way of transformers, where what a sequence "
                "gets would depend on the others of its batch"
            )
    if (path / "adapter_config.json").exists():
        raise CheckpointError(
            f"{path} is an adapter (adapter_config.json), not a model: merge it into its base model first"
        )


def _rope_types(config: PreTrainedConfig) -> Iterator[str]:
    """All rope types in config.json, for all layers or by layer type."""
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):
        if isinstance(part, Mapping) and "rope_type" in part:
            yield str(part["rope_type"])
