"""Where decode rows find their blocks, at addresses that stay: what a captured graph reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTables:
    """Tensors on the model's device for steps in which each of a number of rows computes one token.

    query_starts: [num_rows + 1] int32, 0, 1, 2, ... seq_lens: [num_rows] int32. key_starts: [num_rows + 1] int32, the
    sum of those before each.
    block_tables: [num_groups, num_rows, max_blocks] int32.
    blocks: [num_groups, num_rows] int64, the blocks that keys and values are written to; offsets: [num_rows] int64,
    where in them.
    max_seq_len: no entry of ``seq_lens`` will ever be larger.
    """

    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    key_starts: torch.Tensor
    block_tables: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    max_seq_len: int
