"""Products of many experts in one launch, in Triton, for GPUs and dtypes without a grouped product in torch.

Each program computes a tile of the output for rows of one expert. The device itself finds these rows, so the host does
not wait, and a step can be captured as a graph. A sum runs over the input in order, in tiles of a fixed size: a row's
result does not depend on the other rows.

Source: Gale et al., MegaBlocks, 2023.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

TILE_ROWS: Final = 32
TILE_COLUMNS: Final = 64
TILE_IN: Final = 32


class TritonProducts:
    """See ``ExpertProducts``."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight.contiguous(), None if bias is None else bias.contiguous()
        self._numbers = torch.arange(len(weight), device=weight.device)

    def __call__(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """See ``ExpertProducts``."""
        num_experts, out_size, in_size = self._weight.shape
        rows, num_rows = rows.contiguous(), len(rows)
        ends = torch.searchsorted(experts, self._numbers, right=True)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        tile_ends = ((counts + (TILE_ROWS - 1)) // TILE_ROWS).cumsum(0)
        output = rows.new_empty(num_rows, out_size)
        max_tiles = triton.cdiv(num_rows, TILE_ROWS) + min(num_rows, num_experts)  # each expert may begin one more tile
        _multiply[(max_tiles, triton.cdiv(out_size, TILE_COLUMNS))](
            rows,
            self._weight,
            self._weight if self._bias is None else self._bias,
            output,
            ends,
            tile_ends,
            num_experts,
            out_size,
            in_size,
            HAS_BIAS=self._bias is not None,
            PADDED_EXPERTS=triton.next_power_of_2(num_experts),
            TILE_ROWS=TILE_ROWS,
            TILE_COLUMNS=TILE_COLUMNS,
            TILE_IN=TILE_IN,
            num_warps=4,
            num_stages=2,
        )
        return output


@triton.jit
def _multiply(
    rows,
    weight,
    bias,
    output,
    ends,
    tile_ends,
    num_experts,
    out_size,
    in_size,
    HAS_BIAS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_IN: tl.constexpr,
):
    """One tile of rows, numbered through all experts, times one tile of columns. ends, tile_ends: [num_experts], where
    the rows and the tiles of each expert end.
    """
    tile = tl.program_id(0)
    numbers = tl.arange(0, PADDED_EXPERTS)
    is_expert = numbers < num_experts
    lasts = tl.load(tile_ends + numbers, mask=is_expert, other=0)
    expert = tl.sum((is_expert & (lasts <= tile)).to(tl.int64), axis=0)
    if expert >= num_experts:
        return
    # the expert before; masked out for the first one
    before = tl.maximum(expert - 1, 0)
    first_tile = tl.where(expert > 0, tl.load(tile_ends + before), 0)
    first_row = tl.where(expert > 0, tl.load(ends + before), 0)
    places = first_row + (tile - first_tile) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_row = places < tl.load(ends + expert)
    is_column = columns < out_size
    matrix = weight + expert * out_size * in_size
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], dtype=tl.float32)
    for start in range(0, in_size, TILE_IN):
        inner = start + tl.arange(0, TILE_IN)
        is_inner = inner < in_size
        left = tl.load(
            rows + places[:, None] * in_size + inner[None, :], mask=is_row[:, None] & is_inner[None, :], other=0.0
        )
        right = tl.load(
            matrix + columns[None, :] * in_size + inner[:, None], mask=is_column[None, :] & is_inner[:, None], other=0.0
        )
        total += tl.dot(left, right, input_precision="ieee")
    if HAS_BIAS:
        added = tl.load(bias + expert * out_size + columns, mask=is_column, other=0.0)
        total += added.to(tl.float32)[None, :]
    tl.store(
        output + places[:, None] * out_size + columns[None, :],
        total.to(output.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )
