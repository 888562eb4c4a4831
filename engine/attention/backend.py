"""What an attention backend promises."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from engine.attention.batch import AttentionBatch
from engine.attention.decode_tables import DecodeTables
from engine.layers.heads import HeadTransform
from engine.layers.rotary import Rotations


class AttentionPlan(Protocol):
    """A backend's preparation of one step, used once by each layer."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """Write the step's keys and values to the cache, then attend causally.

        query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim], model dtype.
        window: positions that a token attends to, itself included; None means all.

        Returns:
            [num_tokens, num_heads * head_dim], model dtype.
        """

    def attend_heads(
        self, layer: int, heads: torch.Tensor, transform: HeadTransform, rotations: Rotations, window: int | None
    ) -> torch.Tensor:
        """The same, from the fused projection: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], which may be
        written to.
        """


class AttentionBackend(Protocol):
    """Paged causal attention with grouped heads over one KV cache."""

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """Prepare a step: everything that does not depend on the layer is done here, once."""

    def gathered_bytes(self, max_model_len: int) -> int:
        """What the keys and values of a step of long sequences take beside the cache, at most."""


@runtime_checkable
class DecodeGraphAttention(AttentionBackend, Protocol):
    """A backend whose decode steps can be captured as a graph."""

    def plan_decode(self, tables: DecodeTables) -> AttentionPlan:
        """A plan for any step of one token a row: all it does reads the tables as they are when the device gets
        there, whatever they held when the plan was made.

        Raises:
            CaptureRefusedError: Not on this device.
        """
