"""Runs the products of experts in Triton's interpreter, on the CPU, in a process of its own: Triton decides on import
whether it interprets.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.layers.experts.products import ExpertsPacker
from tests.support import triton_interpreter


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductsCase:
    """A number of rows for each expert, and the sizes of an expert's matrix."""

    counts: tuple[int, ...]
    out_size: int = 64
    in_size: int = 64
    has_bias: bool = False

    def multiply(self, packer: ExpertsPacker, *, rows: slice = slice(None)) -> torch.Tensor:
        """The products of all rows, or of some."""
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(len(self.counts), self.out_size, self.in_size, generator=generator)
        bias = torch.randn(len(self.counts), self.out_size, generator=generator) if self.has_bias else None
        experts = torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts))
        x = torch.randn(len(experts), self.in_size, generator=generator)
        return packer(weight, bias)(x[rows], experts[rows])


def interpret(cases: list[tuple[ProductsCase, slice]], directory: Path) -> list[torch.Tensor]:
    """The kernel's outputs for each case and its rows."""
    return triton_interpreter.interpret(__name__, cases, directory)


def main() -> None:
    """Answer all questions on standard input."""
    from engine.layers.experts.triton_product import TritonProducts

    questions, answers = sys.argv[1:]
    cases = torch.load(questions, weights_only=False)
    torch.save([case.multiply(TritonProducts, rows=rows) for case, rows in cases], answers)


if __name__ == "__main__":
    main()
