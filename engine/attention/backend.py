"""The Protocols of attention backends, and their input: a step's tokens by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.decode_tables import DecodeTables
from engine.contract.step import IntArray
from engine.layers.attention_layer import AttentionLayer
from engine.layers.rotary import Rotations

NumberT = TypeVar("NumberT", np.int32, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """The requests of one step, their tokens back to back in batch order.

    query_starts: [num_reqs + 1] where each request's tokens begin; the last entry is the number of tokens.
    first_positions: [num_reqs] position of each request's first token.
    block_tables: [num_groups, num_reqs, max_blocks] the blocks of each request, for each KV cache group. Entries past a
        request's end, or before the group's window of its first position, name any valid block; they are never attended
        to.
    slots: [num_groups, num_tokens] where each token's key and value go: block id * block_size + offset, int64,
        contiguous.
    is_reused: later steps pass this same batch again, with its arrays overwritten in place; even in other batches of as
        many requests they lie at the same addresses. A request's entries in a block table lie next to each other;
        requests are any constant distance apart. Only for steps in which each request computes one token.
    """

    query_starts: IntArray
    first_positions: IntArray
    block_tables: IntArray
    slots: npt.NDArray[np.int64]
    is_reused: bool = False

    @property
    def num_reqs(self) -> int:
        """Number of requests in the batch."""
        return len(self.first_positions)

    @property
    def is_decode(self) -> bool:
        """True when each request computes one token."""
        return bool(len(self.first_positions) == self.slots.shape[1])

    @property
    def query_lens(self) -> IntArray:
        """[num_reqs] tokens that each request computes."""
        return np.diff(self.query_starts)

    @property
    def seq_lens(self) -> IntArray:
        """[num_reqs] tokens that the last query of each request attends to, itself included."""
        return self.first_positions + self.query_lens


def first_seen(positions: npt.NDArray[NumberT], window: int) -> npt.NDArray[NumberT]:
    """The first position that each position attends to with a window."""
    return np.maximum(positions - (window - 1), 0)


class AttentionPlan(Protocol):
    """A backend's preparation of one step for one KV cache group; each layer of the group uses it once."""

    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write the step's keys and values to the cache, then attend causally.

        query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim], model dtype. If the
            layer has a ``value_size``, ``value`` is that many columns of the keys.

        Returns:
            [num_tokens, num_heads * head_dim], or * ``value_size``, model dtype.
        """

    def attend_heads(self, layer: AttentionLayer, heads: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        """The same, from the fused projection: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], which it may
        overwrite.
        """


@runtime_checkable
class PlanInTwo(AttentionPlan, Protocol):
    """A plan whose ``attend_heads`` is also to be had in two parts: the first is a compiled kernel for any number of
    tokens, the second depends on the requests of the step.
    """

    def place(self, layer: AttentionLayer, heads: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        """Write keys and values to the cache; returns the queries, [num_tokens, num_heads, head_dim]."""

    def attend_placed(
        self, layer: AttentionLayer, heads: torch.Tensor, query: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        """Fill and return ``output``, of the shape of ``query``. ``heads`` are those of :meth:`place`, which overwrote
        them.
        """


AttentionPlans = Sequence[AttentionPlan]
"""One step's plans, one for each KV cache group."""


class AttentionBackend(Protocol):
    """Paged causal attention with grouped heads over one KV cache."""

    def plan(self, batch: AttentionBatch) -> AttentionPlans:
        """Prepare a step: all work that does not depend on the layer, once for each group."""

    def gathered_bytes(self, max_model_len: int) -> int:
        """Most memory that the gathered keys and values of a step of long sequences take, on top of the cache."""


@runtime_checkable
class DecodeGraphAttention(AttentionBackend, Protocol):
    """A backend whose decode steps can be captured as a graph."""

    def plan_decode(self, tables: DecodeTables) -> AttentionPlans:
        """Plans for any step of one token a row. Their work reads the tables when the device runs it, so the tables may
        change after planning.

        Raises:
            CaptureRefusedError: Not on this device.
        """
