"""Norms of the residual stream and of heads, and how the parts of a layer are connected to the stream.

Source: Ba et al., Layer Normalization, 2016; Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
"""

from __future__ import annotations

import ctypes
from functools import partial

import torch
from torch.nn import functional as F

from engine.kernels import rms_norm as kernel
from engine.kernels.call import KernelCall
from engine.layers.fused_ops import FusedOps, root_mean_square_norm
from engine.layers.layer_spec import NormKind, NormSpec


class RMSNorm:
    """Scales vectors to unit root mean square, then by a learnt weight; computed in float32 at least.

    delta_scale: factor of the delta in ``add_and_normalize``; ``fused_ops`` use the same one.
    """

    def __init__(
        self,
        size: int,
        *,
        spec: NormSpec,
        dtype: torch.dtype,
        device: torch.device,
        delta_scale: float = 1.0,
        fused_ops: FusedOps | None = None,
    ) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.spec = spec
        self._delta_scale = delta_scale
        self._fused_ops = fused_ops
        self._compiled = _CompiledNorm(self.weight, spec, delta_scale) if device.type == "cpu" else None

    def targets(self, name: str) -> dict[str, torch.Tensor]:
        """Where the tensors of the norm called ``name`` are loaded."""
        return {f"{name}.weight": self.weight}

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return root_mean_square_norm(hidden, self.weight, self.spec)

    def add_and_normalize(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """Add ``delta`` to ``hidden`` in place, and return the normalised sum; both [num_tokens, size]."""
        if self._compiled is not None:
            assert hidden.is_contiguous()
            assert hidden.dtype == self.weight.dtype
            return self._compiled(hidden, delta, torch.empty_like(hidden))
        if delta is not None:
            if self._fused_ops is not None:
                return self._fused_ops.add_norm(hidden, delta, self.weight)
            hidden.add_(delta, alpha=self._delta_scale)
        return self(hidden)

    def normalize_in_place(self, part: torch.Tensor) -> None:
        """Normalise [num_tokens, size], columns of a wider tensor, in place."""
        if self._compiled is not None:
            self._compiled(part, None, part)
        else:
            part.copy_(self(part))


class _CompiledNorm:
    """One pass over the tokens, instead of ten torch operators."""

    def __init__(self, weight: torch.Tensor, spec: NormSpec, delta_scale: float) -> None:
        self._weight = weight
        self._numbers = (ctypes.c_float * kernel.NUM_NORM_NUMBERS)()
        self._numbers[kernel.EPSILON], self._numbers[kernel.OFFSET] = spec.eps, spec.offset
        self._numbers[kernel.DELTA_SCALE] = delta_scale
        compiled = partial(kernel.compiled_norm, str(weight.dtype).removeprefix("torch."))
        self._call = KernelCall(compiled, kernel.NUM_PARAMETERS)
        self._call.parameters[kernel.WEIGHT] = weight.data_ptr()
        self._call.parameters[kernel.NUMBERS] = ctypes.addressof(self._numbers)
        self._call.parameters[kernel.SIZE] = len(weight)

    def __call__(self, hidden: torch.Tensor, delta: torch.Tensor | None, output: torch.Tensor) -> torch.Tensor:
        """The numbers of a row in ``hidden`` and ``output`` are contiguous; rows may be any distance apart."""
        assert delta is None or delta.is_contiguous()
        parameters = self._call.parameters
        parameters[kernel.HIDDEN], parameters[kernel.OUTPUT] = hidden.data_ptr(), output.data_ptr()
        parameters[kernel.HIDDEN_STRIDE], parameters[kernel.OUTPUT_STRIDE] = hidden.stride(0), output.stride(0)
        parameters[kernel.DELTA] = 0 if delta is None else delta.data_ptr()
        parameters[kernel.NUM_ROWS] = hidden.shape[0]
        self._call.run_over(hidden.numel())
        return output


class LayerNorm:
    """Scales vectors to zero mean and unit variance, then by a learnt weight, and adds a learnt bias."""

    def __init__(
        self, size: int, *, spec: NormSpec, dtype: torch.dtype, device: torch.device, delta_scale: float = 1.0
    ) -> None:
        self.weight, self.bias = torch.empty(2, size, dtype=dtype, device=device)
        self.spec = spec
        self._delta_scale = delta_scale

    def targets(self, name: str) -> dict[str, torch.Tensor]:
        """Where the tensors of the norm called ``name`` are loaded."""
        return {f"{name}.weight": self.weight, f"{name}.bias": self.bias}

    def add_and_normalize(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """Add ``delta`` to ``hidden`` in place, and return the normalised sum; both [num_tokens, size]."""
        if delta is not None:
            hidden.add_(delta, alpha=self._delta_scale)
        return F.layer_norm(hidden, (hidden.shape[-1],), self.weight, self.bias, self.spec.eps)


Norm = RMSNorm | LayerNorm


def build_norm(
    spec: NormSpec,
    size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    delta_scale: float = 1.0,
    fused_ops: FusedOps | None = None,
) -> Norm:
    """The norm that a spec describes."""
    if spec.kind is NormKind.LAYER:
        return LayerNorm(size, spec=spec, dtype=dtype, device=device, delta_scale=delta_scale)
    return RMSNorm(size, spec=spec, dtype=dtype, device=device, delta_scale=delta_scale, fused_ops=fused_ops)


class ResidualNorms:
    """The norms around one part of a layer: ``before`` of its input, ``after`` of its result. Either may be None.

    delta_scale: factor of everything that is added to the residual stream; ``before`` has the same.
    """

    def __init__(self, *, before: Norm | None, after: Norm | None, delta_scale: float) -> None:
        self.before, self.after = before, after
        self._delta_scale = delta_scale

    def enter(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """Add ``delta``, the previous part's result, to the residual stream ``hidden`` in place; both [num_tokens,
        hidden_size]. Returns the input of this part, which must not be written to.
        """
        if self.before is not None:
            return self.before.add_and_normalize(hidden, delta)
        if delta is not None:
            hidden.add_(delta, alpha=self._delta_scale)
        return hidden

    def leave(self, result: torch.Tensor) -> torch.Tensor:
        """What this part adds to the residual stream, given its result."""
        return result if self.after is None else self.after.add_and_normalize(result, None)
