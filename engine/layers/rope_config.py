"""How positions turn into rotations, read from config.json. Does not import torch."""

from __future__ import annotations

import dataclasses
import math
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
    LONGROPE = "longrope"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One rotary embedding; fields that a type does not use keep their defaults.

    attention_factor: None means derived: from ``factor`` and the ``mscale`` fields (yarn), or from ``factor`` and the
        original length (longrope).
    partial: the share of each head that is rotated, from its beginning.
    short_factors, long_factors: factors of each pair's wavelength (longrope), for sequences up to
        ``original_max_position_embeddings`` and for longer ones.
    is_long: ``long_factors`` apply, not ``short_factors``.
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
    partial: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = True

    @property
    def pair_factors(self) -> tuple[float, ...]:
        """The factors that apply."""
        return self.long_factors if self.is_long else self.short_factors

    def rotary_dim(self, head_dim: int) -> int:
        """The number of rotated numbers in a head."""
        return int(head_dim * self.partial)

    def for_length(self, max_model_len: int) -> RopeConfig:
        """The rotary embedding of an engine with sequences up to this length. longrope has two embeddings, up to the
        original length and beyond, and cached keys fit only one of them; so an engine uses one for all sequences.
        """
        if self.rope_type is not RopeType.LONGROPE:
            return self
        return dataclasses.replace(self, is_long=max_model_len > self.original_max_position_embeddings)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Yarn's factor on vectors, for sequences that are ``factor`` times as long."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


_REQUIRED: dict[RopeType, tuple[str, ...]] = {
    RopeType.DEFAULT: (),
    RopeType.LINEAR: ("factor",),
    RopeType.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor"),
    RopeType.YARN: ("factor",),
    RopeType.LONGROPE: ("short_factor", "long_factor"),
}
_OTHER_NAMES = {"su": RopeType.LONGROPE}


def parse_rope_config(
    raw: Mapping[str, Any], *, max_position_embeddings: int, head_dim: int, may_be_partial: bool = False
) -> RopeConfig:
    """Read ``rope_parameters`` (new key), or ``rope_theta`` and ``rope_scaling`` (old keys).

    Raises:
        CheckpointError: A type that is not implemented, a missing value, rotations that differ between layers, or
            partly
            rotated heads in an architecture without them.
    """
    parameters: Mapping[str, Any] = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise CheckpointError("config.json: rope parameters that differ between layer types are not supported")
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor")) or 1.0
    if partial != 1.0 and not may_be_partial:
        raise CheckpointError(f"config.json: partial_rotary_factor {partial} is not supported, only 1.0 is")
    name = parameters.get("rope_type") or parameters.get("type") or RopeType.DEFAULT
    try:
        rope_type = _OTHER_NAMES.get(name) or RopeType(name)
    except ValueError:
        supported = ", ".join(RopeType)
        raise CheckpointError(f"config.json: rope type {name!r} is not supported; supported: {supported}") from None
    missing = [key for key in _REQUIRED[rope_type] if parameters.get(key) is None]
    if missing:
        raise CheckpointError(f"config.json: rope type {rope_type} needs {', '.join(missing)}")
    rope = _build(rope_type, {**parameters, "partial": partial}, raw, max_position_embeddings)
    _check_pairs(rope, head_dim)
    return rope


def _check_pairs(rope: RopeConfig, head_dim: int) -> None:
    """Refuse a rotary embedding that does not fit the size of a head."""
    rotary_dim = rope.rotary_dim(head_dim)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise CheckpointError(
            f"config.json: partial_rotary_factor {rope.partial} does not give an even number of the {head_dim} "
            "dimensions of a head"
        )
    if rope.rope_type is not RopeType.LONGROPE:
        return
    for key, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if len(factors) != rotary_dim // 2:
            raise CheckpointError(
                f"config.json: {key} has {len(factors)} numbers, but {rotary_dim // 2} pairs of a head are rotated"
            )


def _build(
    rope_type: RopeType, parameters: Mapping[str, Any], raw: Mapping[str, Any], max_position_embeddings: int
) -> RopeConfig:
    def number(key: str, default: float) -> float:
        value = parameters.get(key)
        return default if value is None else float(value)

    def optional(key: str) -> float | None:
        value = parameters.get(key)
        return None if value is None else float(value)

    # A value beside the parameters takes precedence: it is the pretraining length of models that extended it.
    original = raw.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    theta = parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0
    # longrope's factor: how much longer sequences may be than in pretraining.
    ratio = max_position_embeddings / int(original or max_position_embeddings)
    return RopeConfig(
        rope_type=rope_type,
        theta=float(theta),
        factor=number("factor", ratio if rope_type is RopeType.LONGROPE else 1.0),
        original_max_position_embeddings=int(original or max_position_embeddings),
        low_freq_factor=number("low_freq_factor", 1.0),
        high_freq_factor=number("high_freq_factor", 4.0),
        beta_fast=number("beta_fast", 0.0) or 32.0,
        beta_slow=number("beta_slow", 0.0) or 1.0,
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=bool(parameters.get("truncate", True)),
        partial=float(parameters["partial"]),
        short_factors=tuple(map(float, parameters.get("short_factor") or ())),
        long_factors=tuple(map(float, parameters.get("long_factor") or ())),
    )
