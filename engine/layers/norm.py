"""Root-mean-square normalisation.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
"""

from __future__ import annotations

import ctypes

import torch
from torch.nn import functional as F

from engine.kernels import rms_norm as kernel
from engine.kernels.call import KernelCall
from engine.layers.fused_ops import FusedOps


class RMSNorm:
    """Scales vectors to unit root mean square, then by a learnt weight; computed in float32 at least."""

    def __init__(
        self, size: int, *, eps: float, dtype: torch.dtype, device: torch.device, fused_ops: FusedOps | None = None
    ) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps
        self._fused_ops = fused_ops
        self._compiled = _CompiledNorm(self.weight, eps) if device.type == "cpu" else None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)

    def add_and_normalize(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """Add ``delta`` to ``hidden`` in place, and return the sum normalised; both [num_tokens, size]."""
        if self._compiled is not None:
            return self._compiled(hidden, delta)
        if delta is not None:
            if self._fused_ops is not None:
                return self._fused_ops.add_norm(hidden, delta, self.weight)
            hidden.add_(delta)
        return self(hidden)


class _CompiledNorm:
    """One pass over the tokens where torch takes ten operators."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._epsilon = ctypes.c_float(eps)
        self._call = KernelCall(kernel.compiled_norm(str(weight.dtype).removeprefix("torch.")), kernel.NUM_PARAMETERS)
        self._call.parameters[kernel.WEIGHT] = weight.data_ptr()
        self._call.parameters[kernel.EPSILON] = ctypes.addressof(self._epsilon)
        self._call.parameters[kernel.SIZE] = len(weight)

    def __call__(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        assert hidden.is_contiguous()
        assert delta is None or delta.is_contiguous()
        output = torch.empty_like(hidden)
        parameters = self._call.parameters
        parameters[kernel.HIDDEN], parameters[kernel.OUTPUT] = hidden.data_ptr(), output.data_ptr()
        parameters[kernel.DELTA] = 0 if delta is None else delta.data_ptr()
        parameters[kernel.NUM_ROWS] = len(hidden)
        self._call.run_over(hidden.numel())
        return output
