"""Runs the kernel for decode rows in Triton's interpreter, on the CPU, in a process of its own: Triton decides on
import whether it interprets.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.attention.varlen import VarlenKernel, VarlenShape
from engine.layers.attention_spec import AttentionSpec
from engine.layers.rope_config import RopeConfig
from tests.support import triton_interpreter

TABLE_PADDING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCase:
    """Rows of ``lengths`` tokens, the last of which attends to all of them or to ``window``."""

    lengths: tuple[int, ...]
    num_kv_heads: int = 1
    group: int = 1
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None

    def attend(self, kernel: VarlenKernel, *, num_rows: int | None = None, hides_blocks: bool = False) -> torch.Tensor:
        """The outputs of the first ``num_rows`` rows. Blocks are scattered, and the padding of tables contains no valid
        block ids.

        hides_blocks: neither does what stands in tables before the window.
        """
        counts = [-(-length // self.block_size) for length in self.lengths]
        generator = torch.Generator().manual_seed(1)
        order = torch.randperm(sum(counts), generator=generator).to(torch.int32) + 1
        tables = torch.zeros(len(self.lengths), max(counts) + TABLE_PADDING, dtype=torch.int32)
        for row, (length, row_blocks) in enumerate(zip(self.lengths, order.split(counts), strict=True)):
            tables[row, : len(row_blocks)] = row_blocks
            if self.window is not None and hides_blocks:
                tables[row, : max(length - self.window, 0) // self.block_size] = 0
        shape_of_blocks = sum(counts) + 1, self.num_kv_heads, 2, 2, self.block_size, self.head_dim
        blocks = torch.randn(shape_of_blocks, generator=generator)
        blocks[0] = torch.nan
        num_heads = self.group * self.num_kv_heads
        fused = torch.randn(len(self.lengths), num_heads + 2 * self.num_kv_heads, self.head_dim, generator=generator)
        rows = slice(0, num_rows or len(self.lengths))
        lengths = torch.tensor(self.lengths[rows], dtype=torch.int32)
        shape = VarlenShape(
            query_starts=torch.arange(len(lengths) + 1, dtype=torch.int32),
            seq_lens=lengths,
            key_starts=torch.cat((torch.zeros(1), lengths.cumsum(0))).to(torch.int32),
            block_tables=tables[rows],
            max_query_len=1,
            max_seq_len=max(self.lengths[rows]),
        )
        keys, values = blocks[:, :, 1].permute(2, 0, 3, 1, 4)
        spec = AttentionSpec(scale=1 / math.sqrt(self.head_dim), rope=RopeConfig(), window=self.window)
        return kernel(fused[rows, :num_heads], keys, values, shape, spec)


def interpret(cases: list[tuple[DecodeCase, int | None]], directory: Path) -> list[torch.Tensor]:
    """The kernel's outputs for each case and number of rows."""
    return triton_interpreter.interpret(__name__, cases, directory)


def main() -> None:
    """Answer all questions on standard input."""
    from engine.attention.paged_decode import paged_decode

    questions, answers = sys.argv[1:]
    cases = torch.load(questions, weights_only=False)
    torch.save([case.attend(paged_decode, num_rows=num_rows, hides_blocks=True) for case, num_rows in cases], answers)


if __name__ == "__main__":
    main()
