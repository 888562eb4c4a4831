"""The interface of attention kernels on GPUs; tests implement it, since torch's kernels have no CPU version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.layers.attention_spec import AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenShape:
    """The sequences of a batch, back to back.

    query_starts: [num_reqs + 1] int32.
    seq_lens: [num_reqs] int32, the number of keys of each request; the last key belongs to its last query. With keys
        back to back, keys before the first query's window are left out.
    key_starts: [num_reqs + 1] int32, where each request's keys start, or would start, back to back.
    block_tables: [num_reqs, max_blocks] int32 if keys are paged, else None.
    """

    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    key_starts: torch.Tensor
    block_tables: torch.Tensor | None
    max_query_len: int
    max_seq_len: int


class VarlenKernel(Protocol):
    """Causal attention of sequences of different lengths, with queries and keys aligned at their ends."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: VarlenShape, spec: AttentionSpec
    ) -> torch.Tensor:
        """Attend: query [num_tokens, num_heads, head_dim]; key and value [num_keys, num_kv_heads, head_dim], or
        [num_blocks, block_size, num_kv_heads, head_dim] if ``shape.block_tables`` is given. Of ``spec`` it uses scale
        and window.
        """
