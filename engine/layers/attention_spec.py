"""How one layer attends: what differs between architectures, and between the layers of one. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.layers.rope_config import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention: the keys and values of all heads are computed from one narrow vector a token.

    query_rank: width of the narrow vector that queries are computed from; None: they use the hidden state.
    rank: width of the narrow vector that keys and values are computed from.
    plain_size: numbers of a head's key computed from that vector. rotated_size: numbers of the key's rotated part,
        which all heads share. value_size: numbers of a head's value.
    is_interleaved: the two coordinates of a rotated pair are neighbours in the checkpoint.
    has_bias: the products into narrow vectors have biases.

    Source: DeepSeek-AI, DeepSeek-V2, 2024.
    """

    query_rank: int | None
    rank: int
    plain_size: int
    rotated_size: int
    value_size: int
    is_interleaved: bool
    has_bias: bool

    @property
    def head_size(self) -> int:
        """Size of a head's query."""
        return self.plain_size + self.rotated_size

    @property
    def cached_size(self) -> int:
        """Numbers cached for a token: the narrow vector and the rotated part."""
        return self.rank + self.rotated_size


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """How one layer attends: written by an architecture's file, read by attention backends.

    scale: factor of the products of queries and keys, which gives their scores.
    rope: how queries and keys are rotated by position; None: not at all.
    window: how many positions a token sees, itself included; None: all up to itself.
    softcap: scores ``s`` become ``softcap * tanh(s / softcap)``; None: no cap.
    value_size: the value of a token is this many leading numbers of its key; None: it has its own value, as wide as the
        key.
    has_sinks: each query head has a learned score that takes part in the softmax but adds no value.
    """

    scale: float
    rope: RopeConfig | None
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    value_size: int | None = None
