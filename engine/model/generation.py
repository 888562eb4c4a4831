"""What a checkpoint says of how to sample from it. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.contract.errors import CheckpointError
from engine.model.model_config import read_config_json, read_json_object


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The end-of-sequence tokens, and the sampling values that a request without its own should get.

    A value is None where the checkpoint does not say. ``temperature`` is 0 where it asks for greedy decoding.
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def load_generation_defaults(path: Path) -> GenerationDefaults:
    """Read generation_config.json, and config.json for what it leaves out.

    Raises:
        CheckpointError: A file is unreadable or holds values of the wrong type.
    """
    config = read_config_json(path)
    file = path / "generation_config.json"
    generation = read_json_object(file) if file.is_file() else {}
    eos = generation.get("eos_token_id")
    temperature = _number(generation, "temperature")
    if generation.get("do_sample") is False:
        temperature = 0.0
    top_k = _number(generation, "top_k")
    return GenerationDefaults(
        eos_token_ids=_token_ids(config.get("eos_token_id") if eos is None else eos),
        temperature=temperature,
        top_p=_number(generation, "top_p"),
        top_k=None if top_k is None else int(top_k),
        min_p=_number(generation, "min_p"),
        repetition_penalty=_number(generation, "repetition_penalty"),
    )


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
        raise CheckpointError(f"eos_token_id must be an integer or a list of integers, got {value!r}")
    return tuple(values)


def _number(raw: Mapping[str, Any], key: str) -> float | None:
    value = raw.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CheckpointError(f"generation_config.json: {key} must be a number, got {value!r}")
    return float(value)
