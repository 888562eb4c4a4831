"""How one layer attends: what differs between architectures, and between the layers of one. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.layers.rope_config import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What an architecture's file says of one layer, and what attention backends compute by.

    scale: what the products of queries and keys are multiplied with: their score.
    rope: how queries and keys are rotated by their positions; None: they are not.
    window: how many positions a token sees, itself included; None: all before it.
    softcap: scores ``s`` become ``softcap * tanh(s / softcap)``; None: they stay.
    value_size: a token has no value beside its key: the first so many numbers of the key are its value. None: it has
        one, as wide as the key.
    has_sinks: each query head has a learned score that takes part in the softmax and brings no value.
    """

    scale: float
    rope: RopeConfig | None
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    value_size: int | None = None
