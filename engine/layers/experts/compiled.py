"""A layer's experts on a CPU in one compiled kernel, from the chosen experts to the weighted sum."""

from __future__ import annotations

import platform
from functools import cache, partial

import torch
from llvmlite import binding

from engine.device.huge_pages import WEIGHTS
from engine.kernels.amx import has_tiles
from engine.kernels.call import KernelCall
from engine.kernels.experts import mixture as kernel
from engine.kernels.products.tile_product import PANEL, UNROLLED
from engine.layers.activation import ClampNumbers, gate_kind
from engine.layers.layer_spec import Activation, GateClamp
from engine.layers.panel_weight import narrowest_exact, suits_panels

CACHED_NUMBERS = 1 << 18
"""Numbers of a product's input that a core's own cache holds while all panels are applied to them."""

SPARE_NUMBERS = 16
"""Padding between rows. Rows that start a power of two apart compete for the same few places in a cache."""

Matrices = tuple[torch.Tensor, torch.Tensor | None]
"""Weights of all experts, [num_experts, out_size, in_size], and their biases, [num_experts, out_size], if any."""


class CompiledExperts:
    """The gated MLPs of all experts. Everything is computed in float32; only the final sum is rounded.

    float32 weights that are exact in bfloat16 are stored as bfloat16, as in ``PanelWeight``.
    """

    def __init__(self, gate_up: Matrices, down: Matrices, *, activation: Activation, clamp: GateClamp | None) -> None:
        weight = gate_up[0]
        self._num_experts, self._hidden_size = weight.shape[0], weight.shape[2]
        self._inner_size = weight.shape[1] // 2
        self._dtype = weight.dtype
        stored = narrowest_exact(gate_up[0], down[0])
        self._gate_up, self._gate_up_bias = _pair_panels(*gate_up, stored)
        self._down, self._down_bias = _panels(*down, stored)
        self._numbers = ClampNumbers(clamp)
        compiled = partial(kernel.compiled_mixture, _name(weight.dtype), _name(stored))
        self._call = KernelCall(compiled, kernel.NUM_PARAMETERS, num_counters=kernel.NUM_COUNTERS)
        self._set_constants(gate_kind(activation, clamp))

    def _set_constants(self, kind: int) -> None:
        p = self._call.parameters
        p[kernel.NUMBERS] = self._numbers.address
        p[kernel.GATE_UP], p[kernel.GATE_UP_BIAS] = self._gate_up.data_ptr(), self._gate_up_bias.data_ptr()
        p[kernel.DOWN], p[kernel.DOWN_BIAS] = self._down.data_ptr(), self._down_bias.data_ptr()
        p[kernel.NUM_EXPERTS], p[kernel.KIND] = self._num_experts, kind
        p[kernel.HIDDEN_SIZE], p[kernel.INNER_SIZE] = self._hidden_size, self._inner_size
        p[kernel.ROW_STRIDE] = self._hidden_size + SPARE_NUMBERS
        p[kernel.INNER_STRIDE] = self._inner_size + SPARE_NUMBERS
        p[kernel.GATE_UP_HEIGHT] = _height(self._hidden_size)
        p[kernel.DOWN_HEIGHT] = _height(self._inner_size)

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts.

        x: [num_tokens, hidden_size]; experts, int64, and weights, float32: [num_tokens, num_active].

        Returns:
            [num_tokens, hidden_size], summed from a token's first expert to its last.
        """
        x, experts, weights = x.contiguous(), experts.contiguous(), weights.contiguous()
        num_rows, p = experts.numel(), self._call.parameters
        output = torch.empty_like(x)
        room = torch.empty(num_rows, p[kernel.ROW_STRIDE] + p[kernel.INNER_STRIDE] + self._hidden_size)
        blocks = sum(
            kernel.max_blocks(num_rows, self._num_experts, p[field])
            for field in (kernel.GATE_UP_HEIGHT, kernel.DOWN_HEIGHT)
        )
        tables = torch.empty(kernel.tables_size(num_rows, self._num_experts, blocks), dtype=torch.int64)
        p[kernel.INPUT], p[kernel.OUTPUT] = x.data_ptr(), output.data_ptr()
        p[kernel.EXPERTS], p[kernel.WEIGHTS] = experts.data_ptr(), weights.data_ptr()
        p[kernel.NUM_TOKENS], p[kernel.NUM_ACTIVE] = experts.shape
        p[kernel.ROWS] = room.data_ptr()
        p[kernel.INNER] = p[kernel.ROWS] + num_rows * p[kernel.ROW_STRIDE] * kernel.FLOAT32_BYTES
        p[kernel.RESULTS] = p[kernel.INNER] + num_rows * p[kernel.INNER_STRIDE] * kernel.FLOAT32_BYTES
        p[kernel.TABLES] = tables.data_ptr()
        self._call.run_over(num_rows * self._inner_size * self._hidden_size)
        return output


def fits_compiled(gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """True if the matrices fit panels, and panels are faster on this machine than products of one expert each.

    On CPUs that multiply bfloat16 by AMX, this holds for float32 only: this kernel computes in float32.
    """
    sizes = down.shape[1:]
    is_even = all(size > 0 and size % PANEL == 0 and size % UNROLLED == 0 for size in sizes)
    if gate_up.dtype is torch.bfloat16 and has_tiles():
        return False
    is_faster = suits_panels(gate_up.dtype) or (gate_up.dtype is torch.float32 and _has_wide_registers())
    return is_even and gate_up.device.type == "cpu" and is_faster


@cache
def _has_wide_registers() -> bool:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    return bool(binding.get_host_cpu_features().get("avx512f", False))


def _height(in_size: int) -> int:
    return max(CACHED_NUMBERS // in_size, 1)


def _panels(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights as [num_experts, out_size / PANEL, in_size, PANEL], and the biases in float32."""
    num_experts, out_size, in_size = weight.shape
    panels = WEIGHTS.empty(num_experts, out_size // PANEL, in_size, PANEL, dtype=dtype)
    panels.copy_(weight.view(num_experts, -1, PANEL, in_size).transpose(2, 3))
    return panels, torch.zeros(num_experts, out_size) if bias is None else bias.float().contiguous()


def _pair_panels(
    weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like ``_panels``, with panels of both halves of the outputs alternating: [num_experts, out_size / 2 / PANEL, 2,
    in_size, PANEL].
    """
    num_experts, out_size, in_size = weight.shape
    panels = WEIGHTS.empty(num_experts, out_size // 2 // PANEL, 2, in_size, PANEL, dtype=dtype)
    panels.copy_(weight.view(num_experts, 2, -1, PANEL, in_size).permute(0, 2, 1, 4, 3))
    if bias is None:
        return panels, torch.zeros(num_experts, out_size)
    return panels, bias.float().view(num_experts, 2, -1, PANEL).transpose(1, 2).contiguous()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
