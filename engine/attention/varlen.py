"""The one kernel that attention on GPUs rests on, as a seam: torch has no CPU version of it to test with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.attention.varlen import varlen_attn


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenShape:
    """The sequences of a batch, back to back.

    query_starts: [num_reqs + 1] int32; seq_lens: [num_reqs] int32, the keys that each request's last query sees.
    key_starts: [num_reqs + 1] int32 where keys are back to back as well, else None.
    block_tables: [num_reqs, max_blocks] int32 where keys are paged, else None.
    """

    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    key_starts: torch.Tensor | None
    block_tables: torch.Tensor | None
    max_query_len: int
    max_seq_len: int


class VarlenKernel(Protocol):
    """Causal attention of sequences of different lengths, aligned at their ends."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: VarlenShape, window: int | None
    ) -> torch.Tensor:
        """Attend: query [num_tokens, num_heads, head_dim]; key and value [num_keys, num_kv_heads, head_dim], or
        [num_blocks, block_size, num_kv_heads, head_dim] where ``shape.block_tables`` is given.
        """


def flash_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: VarlenShape, window: int | None
) -> torch.Tensor:
    """FlashAttention; one split, so that a request's numbers do not depend on the batch around it."""
    output = varlen_attn(
        query,
        key,
        value,
        shape.query_starts,
        shape.key_starts,
        shape.max_query_len,
        shape.max_seq_len,
        # the kernel counts the positions to the left of a token, ours counts the token as well
        window_size=(-1, 0) if window is None else (window - 1, 0),
        enable_gqa=True,
        seqused_k=None if shape.block_tables is None else shape.seq_lens,
        block_table=shape.block_tables,
        num_splits=1,
    )
    assert isinstance(output, torch.Tensor)
    return output
