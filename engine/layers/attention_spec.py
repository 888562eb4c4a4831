"""How one layer attends: what differs between architectures, and between the layers of one. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.layers.rope_config import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention: the keys and values of all heads are made from one narrow vector a token.

    query_rank: width of the vector that queries are made from; None: they are made from the hidden state.
    rank: width of the vector that keys and values are made from.
    plain_size, rotated_size: numbers of a head's key that come from that vector, and of its rotated part, which all
        heads share. value_size: numbers of a head's value.
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
        """Numbers of a head's query."""
        return self.plain_size + self.rotated_size

    @property
    def cached_size(self) -> int:
        """Numbers that are cached of a token: the narrow vector, and what is rotated."""
        return self.rank + self.rotated_size


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
