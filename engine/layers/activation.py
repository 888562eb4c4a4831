"""The activation between the two products of an MLP.

Source: Shazeer, GLU Variants Improve Transformer, 2020; Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.
"""

from __future__ import annotations

import ctypes
from functools import partial

import torch

from engine.kernels import activation as kernel
from engine.kernels.call import KernelCall
from engine.layers.fused_ops import FusedOps, activate_halves, activate_plain
from engine.layers.layer_spec import Activation, GateClamp
from engine.layers.panel_weight import rows_for_product

_GATED_KINDS = {
    Activation.SILU: kernel.SILU_GATE,
    Activation.GELU: kernel.GELU_GATE,
    Activation.GELU_TANH: kernel.GELU_TANH_GATE,
}
_PLAIN_KINDS = {Activation.GELU: kernel.GELU, Activation.GELU_TANH: kernel.GELU_TANH}


def gate_kind(activation: Activation, clamp: GateClamp | None) -> int:
    """The number by which compiled kernels know a gated activation."""
    return _GATED_KINDS[activation] if clamp is None else kernel.CLAMPED_GATE


class ClampNumbers:
    """The numbers of a clamped gate, at an address for compiled kernels."""

    def __init__(self, clamp: GateClamp | None) -> None:
        self._numbers = (ctypes.c_float * kernel.NUM_CLAMP_NUMBERS)()
        if clamp is not None:
            self._numbers[kernel.ALPHA], self._numbers[kernel.LIMIT] = clamp.alpha, clamp.limit
        self.address = ctypes.addressof(self._numbers)


class ActivationLayer:
    """activation(gate) * up, or activation(x) if not ``is_gated``. ``clamp`` replaces this by the clamped gate.

    feeds_product: a ``Linear`` reads the output, whose rows may then have gaps between them (``rows_for_product``).
    """

    def __init__(
        self,
        activation: Activation,
        *,
        is_gated: bool,
        clamp: GateClamp | None = None,
        feeds_product: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        fused_ops: FusedOps | None = None,
    ) -> None:
        kind = gate_kind(activation, clamp) if is_gated else _PLAIN_KINDS.get(activation)
        self._activation, self._is_gated, self._clamp = activation, is_gated, clamp
        self._feeds_product, self._fused_ops = feeds_product, fused_ops
        self._call: KernelCall | None = None
        if device.type == "cpu" and kind is not None:
            self._numbers = ClampNumbers(clamp)
            compiled = partial(kernel.compiled_activation, str(dtype).removeprefix("torch."))
            self._call = KernelCall(compiled, kernel.NUM_PARAMETERS, rows_at=kernel.NUM_ROWS)
            self._call.parameters[kernel.KIND] = kind
            self._call.parameters[kernel.NUMBERS] = self._numbers.address

    def __call__(self, source: torch.Tensor) -> torch.Tensor:
        """[num_tokens, 2 * size], the gate first, or [num_tokens, size] without a gate, to [num_tokens, size]."""
        if self._call is None:
            return self._by_operators(source)
        assert source.is_contiguous()
        num_tokens, size = source.shape[0], source.shape[1] // (1 + self._is_gated)
        if self._feeds_product:
            output = rows_for_product(num_tokens, size, source.dtype)
        else:
            output = source.new_empty(num_tokens, size)
        parameters = self._call.parameters
        parameters[kernel.INPUT], parameters[kernel.OUTPUT] = source.data_ptr(), output.data_ptr()
        parameters[kernel.NUM_ROWS], parameters[kernel.SIZE] = num_tokens, size
        parameters[kernel.OUTPUT_STRIDE] = output.stride(0)
        self._call.run_over(output.numel())
        return output

    def _by_operators(self, source: torch.Tensor) -> torch.Tensor:
        if not self._is_gated:
            return activate_plain(source, self._activation)
        if self._clamp is not None:
            return _clamp_halves(source, self._clamp)
        if self._fused_ops is not None:
            return self._fused_ops.gate(source)
        return activate_halves(source, self._activation)


def _clamp_halves(gate_up: torch.Tensor, clamp: GateClamp) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return gate * torch.sigmoid(clamp.alpha * gate) * (up + 1)
