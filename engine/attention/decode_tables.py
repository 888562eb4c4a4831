"""The block tables and lengths of decode rows at fixed addresses, for captured graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTables:
    """Tensors on the model's device for steps in which each row computes one token.

    query_starts: [num_rows + 1] int32: 0, 1, 2, ... seq_lens: [num_rows] int32. key_starts: [num_rows + 1] int32, the
        sum of the preceding seq_lens.
    block_tables: [num_groups, num_rows, max_blocks] int32.
    blocks: [num_groups, num_rows] int64, the block that each row's key and value go to; offsets: [num_rows] int64, the
        offset in it.
    max_seq_len: upper bound of ``seq_lens`` in all steps.
    """

    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    key_starts: torch.Tensor
    block_tables: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    max_seq_len: int
