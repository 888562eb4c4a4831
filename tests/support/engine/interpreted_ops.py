"""Runs the fused operators in Triton's interpreter, on the CPU, in a process of its own: Triton decides on import
whether it interprets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.layers.attention_layer import HeadTransform
from engine.layers.fused_ops import FusedOps, activate_halves, root_mean_square_norm
from engine.layers.layer_spec import Activation, FusedSpec, NormSpec
from engine.layers.norm import RMSNorm
from engine.layers.rotary import Rotations
from tests.support import triton_interpreter

NUM_BLOCKS = 5
CPU = torch.device("cpu")
PLAIN = FusedSpec(norm=NormSpec(eps=1e-5))
Build = Callable[[FusedSpec], FusedOps]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsCase:
    """A number of tokens of a model with these sizes; ``num_pairs`` of each head are rotated."""

    num_tokens: int
    size: int = 48
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    num_pairs: int = 8
    has_norms: bool = False
    block_size: int = 4
    spec: FusedSpec = PLAIN
    dtype: str = "float32"

    def answer(
        self, build: Build | None, *, rows: slice = slice(None), device: torch.device = CPU
    ) -> list[torch.Tensor]:
        """What fused operators, or None: plain ones, say of the tokens, or of some of them: the sum and its norm, the
        gated activation, queries, and all blocks of the cache. Plain ones are for CPUs.
        """
        generator = torch.Generator().manual_seed(3)
        dtype: torch.dtype = getattr(torch, self.dtype)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        hidden, delta, gate_up = (random(self.num_tokens, size)[rows] for size in (self.size, self.size, 2 * self.size))
        weight = random(self.size)
        heads = random(self.num_tokens, self.num_heads + 2 * self.num_kv_heads, self.head_dim)[rows]
        norms = (random(self.head_dim), random(self.head_dim)) if self.has_norms else None
        table = random(3 * self.num_tokens, 2, self.num_pairs)
        positions = torch.randperm(3 * self.num_tokens, generator=generator)[: self.num_tokens][rows].to(device)
        slots = torch.randperm(NUM_BLOCKS * self.block_size, generator=generator)[: self.num_tokens][rows].to(device)
        places = slots // self.block_size, slots % self.block_size
        # head-major, as blocks lie; of two layers, the second
        blocks = torch.zeros(NUM_BLOCKS, self.num_kv_heads, 2, 2, self.block_size, self.head_dim).to(device, dtype)
        keys, values = (blocks[:, :, 1, part].transpose(1, 2) for part in (0, 1))
        chosen = rows_of(table, positions)
        if build is None:
            hidden.add_(delta, alpha=self.spec.residual_scale)
            normed = root_mean_square_norm(hidden, weight, self.spec.norm)
            gated = activate_halves(gate_up, self.spec.activation)
            query, key, value = self._transform(norms, dtype)(heads, chosen)
            keys[places], values[places] = key, value
        else:
            ops = build(self.spec)
            normed = ops.add_norm(hidden, delta, weight)
            gated = ops.gate(gate_up)
            counts = self.num_heads, self.num_kv_heads
            query = ops.place_heads(heads, counts, norms, chosen, (keys, values), places)
        return [hidden, normed, gated, query, blocks]

    def _transform(self, norms: tuple[torch.Tensor, torch.Tensor] | None, dtype: torch.dtype) -> HeadTransform:
        made: list[RMSNorm | None] = [None, None]
        for index, weight in enumerate(norms or ()):
            norm = RMSNorm(self.head_dim, spec=self.spec.norm, dtype=dtype, device=CPU)
            norm.weight.copy_(weight)
            made[index] = norm
        return HeadTransform(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, query_norm=made[0], key_norm=made[1]
        )


def rows_of(table: torch.Tensor, positions: torch.Tensor) -> Rotations:
    """Rows of a table, as ``RotationTable`` returns them."""
    return Rotations(table, positions)


CASES = (
    OpsCase(num_tokens=1),
    OpsCase(num_tokens=9, size=700, num_heads=14, num_kv_heads=2, head_dim=20, num_pairs=10),
    OpsCase(num_tokens=6, num_heads=9, num_kv_heads=3, head_dim=12, num_pairs=4, has_norms=True),
    OpsCase(num_tokens=5, size=1300, num_pairs=0, spec=FusedSpec(norm=NormSpec(), activation=Activation.GELU)),
    OpsCase(
        num_tokens=7,
        has_norms=True,
        spec=FusedSpec(norm=NormSpec(eps=1e-6, offset=1.0), residual_scale=0.3, activation=Activation.GELU_TANH),
    ),
)


def interpret(cases: list[tuple[OpsCase, slice]], directory: Path) -> list[list[torch.Tensor]]:
    """The kernels' outputs for each case and its rows."""
    return triton_interpreter.interpret(__name__, cases, directory)


def main() -> None:
    """Answer all questions on standard input."""
    from engine.layers.triton_ops import TritonOps

    questions, answers = sys.argv[1:]
    cases = torch.load(questions, weights_only=False)
    torch.save([case.answer(TritonOps, rows=rows) for case, rows in cases], answers)


if __name__ == "__main__":
    main()
