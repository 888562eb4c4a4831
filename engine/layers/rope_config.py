"""How positions turn into rotations, read from config.json. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from engine.contract.errors import CheckpointError


class RopeType(StrEnum):
    """The rotary scalings that are implemented."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One rotary embedding; fields that a type does not use keep their defaults.

    ``attention_factor`` None means: derived from ``factor`` and the ``mscale`` fields (yarn).
    """

    rope_type: RopeType = RopeType.DEFAULT
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


_REQUIRED: dict[RopeType, tuple[str, ...]] = {
    RopeType.DEFAULT: (),
    RopeType.LINEAR: ("factor",),
    RopeType.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor"),
    RopeType.YARN: ("factor",),
}


def parse_rope_config(raw: Mapping[str, Any], *, max_position_embeddings: int) -> RopeConfig:
    """Read ``rope_parameters`` (new key), or ``rope_theta`` and ``rope_scaling`` (old keys).

    Raises:
        CheckpointError: A type that is not implemented, a missing value, or rotations that differ between layers.
    """
    parameters: Mapping[str, Any] = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise CheckpointError("config.json: rope parameters that differ between layer types are not supported")
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor")) or 1.0
    if partial != 1.0:
        raise CheckpointError(f"config.json: partial_rotary_factor {partial} is not supported, only 1.0 is")
    name = parameters.get("rope_type", parameters.get("type")) or RopeType.DEFAULT
    try:
        rope_type = RopeType(name)
    except ValueError:
        supported = ", ".join(RopeType)
        raise CheckpointError(f"config.json: rope type {name!r} is not supported; supported: {supported}") from None
    missing = [key for key in _REQUIRED[rope_type] if parameters.get(key) is None]
    if missing:
        raise CheckpointError(f"config.json: rope type {rope_type} needs {', '.join(missing)}")
    return _build(rope_type, parameters, raw, max_position_embeddings)


def _build(
    rope_type: RopeType, parameters: Mapping[str, Any], raw: Mapping[str, Any], max_position_embeddings: int
) -> RopeConfig:
    def number(key: str, default: float) -> float:
        value = parameters.get(key)
        return default if value is None else float(value)

    def optional(key: str) -> float | None:
        value = parameters.get(key)
        return None if value is None else float(value)

    # A value beside the parameters is the pretraining length of models that extended it, and wins.
    original = raw.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    theta = parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0
    return RopeConfig(
        rope_type=rope_type,
        theta=float(theta),
        factor=number("factor", 1.0),
        original_max_position_embeddings=int(original or max_position_embeddings),
        low_freq_factor=number("low_freq_factor", 1.0),
        high_freq_factor=number("high_freq_factor", 4.0),
        beta_fast=number("beta_fast", 0.0) or 32.0,
        beta_slow=number("beta_slow", 0.0) or 1.0,
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=bool(parameters.get("truncate", True)),
    )
