"""The gates between the two halves of an MLP.

Source: Shazeer, GLU Variants Improve Transformer, 2020.
"""

from __future__ import annotations

import torch

from engine.kernels import gated_silu as kernel
from engine.kernels.call import KernelCall
from engine.layers.fused_ops import FusedOps, gate_halves


class GatedSiLU:
    """silu(gate) * up."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device, fused_ops: FusedOps | None = None) -> None:
        self._gate = gate_halves if fused_ops is None else fused_ops.gate
        self._call: KernelCall | None = None
        if device.type == "cpu":
            self._call = KernelCall(kernel.compiled_gate(str(dtype).removeprefix("torch.")), kernel.NUM_PARAMETERS)

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[num_tokens, 2 * size], the gate first, to [num_tokens, size]."""
        return self._gate(gate_up) if self._call is None else _run(self._call, gate_up)


class ClampedGate:
    """See ``GateClamp``."""

    def __init__(self, alpha: float, limit: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self._alpha, self._limit = alpha, limit
        self._call: KernelCall | None = None
        if device.type == "cpu":
            address = kernel.compiled_clamped_gate(str(dtype).removeprefix("torch."))
            self._call = KernelCall(address, kernel.NUM_CLAMPED_PARAMETERS)
            bits = torch.tensor([alpha, limit]).view(torch.int32).tolist()
            self._call.parameters[kernel.ALPHA], self._call.parameters[kernel.LIMIT] = bits

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[num_tokens, 2 * size], the gate first, to [num_tokens, size]."""
        if self._call is not None:
            return _run(self._call, gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        return gate * torch.sigmoid(self._alpha * gate) * (up + 1)


def _run(call: KernelCall, gate_up: torch.Tensor) -> torch.Tensor:
    assert gate_up.is_contiguous()
    num_tokens, size = len(gate_up), gate_up.shape[1] // 2
    output = gate_up.new_empty(num_tokens, size)
    parameters = call.parameters
    parameters[kernel.GATE_UP], parameters[kernel.OUTPUT] = gate_up.data_ptr(), output.data_ptr()
    parameters[kernel.NUM_ROWS], parameters[kernel.SIZE] = num_tokens, size
    call.run_over(output.numel())
    return output
