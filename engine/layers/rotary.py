"""Rotary position embedding with the scalings of RopeConfig.

Source: Su et al., RoFormer, 2021; Peng et al., YaRN, 2023; Ding et al., LongRoPE, 2024.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch

from engine.layers.rope_config import RopeConfig, RopeType, yarn_mscale


class Rotations:
    """The rotations of one step's tokens, shared by all layers.

    table: [max_positions, 2, num_pairs] cosine and sine of every position, in the model's dtype. num_pairs is half of
        head_dim; less if only the first part of a head is rotated; 0 if nothing is.
    positions: [num_tokens], int64.
    """

    def __init__(self, table: torch.Tensor, positions: torch.Tensor) -> None:
        self.table, self.positions = table, positions

    @property
    def cosine(self) -> torch.Tensor:
        """[num_tokens, 1, num_pairs], for operators that need them."""
        return self._rows[:, 0, None, :]

    @property
    def sine(self) -> torch.Tensor:
        """[num_tokens, 1, num_pairs], for operators that need them."""
        return self._rows[:, 1, None, :]

    @cached_property
    def _rows(self) -> torch.Tensor:
        return self.table.index_select(0, self.positions)


class RotationTable:
    """[max_positions, 2, num_pairs] cosine and sine of every position, in the model's dtype."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    def rotations(self, positions: torch.Tensor) -> Rotations:
        """The rotations for the tokens of one step."""
        return Rotations(self._table, positions)


class RotaryEmbedding(RotationTable):
    """Rotates queries and keys by position if ``config`` is given; the angles are computed once, in float32."""

    def __init__(
        self, config: RopeConfig | None, *, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if config is None:
            table = torch.empty(max_positions, 2, 0)
        else:
            frequencies = inverse_frequencies(config, head_dim=head_dim)
            angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
            table = torch.stack((angles.cos(), angles.sin()), dim=1) * attention_scaling(config)
        super().__init__(table.to(device=device, dtype=dtype).contiguous())


def rotate_halves(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate [num_tokens, num_heads, head_dim] by cosine and sine of [num_tokens, 1, head_dim / 2]. The coordinates of
    a pair lie in the first and the second half of a head.
    """
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def rotate(heads: torch.Tensor, rotations: Rotations) -> torch.Tensor:
    """Rotate heads, or the first part of each if angles exist only for that."""
    num_rotated = 2 * rotations.cosine.shape[-1]
    if num_rotated == heads.shape[-1]:
        return rotate_halves(heads, rotations.cosine, rotations.sine)
    if num_rotated == 0:
        return heads
    rotated = rotate_halves(heads[..., :num_rotated], rotations.cosine, rotations.sine)
    return torch.cat((rotated, heads[..., num_rotated:]), dim=-1)


def attention_scaling(config: RopeConfig) -> float:
    """The factor on cosine and sine; other than 1 only for yarn and longrope."""
    if config.rope_type not in (RopeType.YARN, RopeType.LONGROPE):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.rope_type is RopeType.LONGROPE:
        if config.factor <= 1.0:
            return 1.0
        return math.sqrt(1 + math.log(config.factor) / math.log(config.original_max_position_embeddings))
    if config.mscale and config.mscale_all_dim:
        return yarn_mscale(config.factor, config.mscale) / yarn_mscale(config.factor, config.mscale_all_dim)
    return yarn_mscale(config.factor, 1.0)


def inverse_frequencies(config: RopeConfig, *, head_dim: int) -> torch.Tensor:
    """Radians per position of each rotated pair of coordinates, in float32: [head_dim / 2], or fewer."""
    rotary_dim = config.rotary_dim(head_dim)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    plain = 1.0 / config.theta**exponents
    match config.rope_type:
        case RopeType.DEFAULT:
            return plain
        case RopeType.LINEAR:
            return plain / config.factor
        case RopeType.LLAMA3:
            return _llama3(plain, config)
        case RopeType.YARN:
            return _yarn(plain, config, rotary_dim)
        case RopeType.LONGROPE:
            return 1.0 / (torch.tensor(config.pair_factors) * config.theta**exponents)


def _llama3(plain: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Slow rotations are stretched by ``factor``, fast ones stay, and those between are blended."""
    original = config.original_max_position_embeddings
    rotations = original * plain / (2 * math.pi)
    blend = (rotations - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1.0 - blend) * plain / config.factor + blend * plain


def _yarn(plain: torch.Tensor, config: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """Blend of stretched and plain frequencies along a ramp between ``beta_fast`` and ``beta_slow`` rotations."""

    def dimension_of(num_rotations: float) -> float:
        original = config.original_max_position_embeddings
        return rotary_dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # keeps the ramp finite
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / config.factor * ramp + plain * (1.0 - ramp)
