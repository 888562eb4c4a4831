"""What an attention backend gets, a step's tokens by request, and what it promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from engine.attention.decode_tables import DecodeTables
from engine.contract.step import IntArray
from engine.layers.heads import HeadTransform
from engine.layers.rotary import Rotations


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """The requests of one step, their tokens back to back in batch order.

    query_starts: [num_reqs + 1] where each request's tokens begin; the last entry is the number of tokens.
    first_positions: [num_reqs] position of each request's first token.
    block_tables: [num_reqs, max_blocks] the blocks of each request; entries past its end are any valid block.
    slots: [num_tokens] where each token's key and value go: block id * block_size + offset, int64.
    is_reused: the batch comes again for other steps, its contiguous arrays written anew where they are; only for steps
        in which each request computes one token.
    """

    query_starts: IntArray
    first_positions: IntArray
    block_tables: IntArray
    slots: np.ndarray[tuple[int], np.dtype[np.int64]]
    is_reused: bool = False

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return len(self.first_positions)

    @property
    def is_decode(self) -> bool:
        """True when each request computes one token."""
        return len(self.slots) == len(self.first_positions)

    @property
    def query_lens(self) -> IntArray:
        """[num_reqs] tokens that each request computes."""
        return np.diff(self.query_starts)

    @property
    def seq_lens(self) -> IntArray:
        """[num_reqs] tokens that the last query of each request attends to, itself included."""
        return self.first_positions + self.query_lens


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
