"""Norms of the residual stream and of heads, and how the parts of a layer are connected to the stream.

Source: Ba et al., Layer Normalization, 2016; Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F

from engine.kernels import norms as kernel
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
        self._compiled = _CompiledPass(dtype, delta_scale, spec, self.weight) if device.type == "cpu" else None

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
            output = torch.empty_like(hidden)
            self._compiled(hidden, delta, output)
            return output
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


class _CompiledPass:
    """Adds to the residual stream, then normalises, in one pass over the tokens instead of ten torch operators."""

    def __init__(self, dtype: torch.dtype, delta_scale: float, spec: NormSpec, *weights: torch.Tensor) -> None:
        """``weights``: the norm's weight, and of a layer norm the bias; none if nothing is normalised."""
        self._weights = weights  # the kernel holds their addresses
        compile_pass = kernel.compiled_layer_norm if spec.kind is NormKind.LAYER else kernel.compiled_norm
        self._call = KernelCall(
            partial(compile_pass, str(dtype).removeprefix("torch.")),
            kernel.NUM_PARAMETERS,
            numbers_at=kernel.NUMBERS,
            num_numbers=kernel.NUM_NORM_NUMBERS,
            rows_at=kernel.NUM_ROWS,
        )
        numbers = self._call.numbers
        numbers[kernel.EPSILON], numbers[kernel.OFFSET] = spec.eps, spec.offset
        numbers[kernel.DELTA_SCALE] = delta_scale
        for field, weight in zip((kernel.WEIGHT, kernel.BIAS), weights, strict=False):
            self._call.parameters[field] = weight.data_ptr()

    def __call__(self, hidden: torch.Tensor, delta: torch.Tensor | None, output: torch.Tensor | None) -> None:
        """The numbers of a row in ``hidden`` and ``output`` are contiguous; rows may be any distance apart. Without an
        ``output`` nothing is normalised.
        """
        assert hidden.stride(1) == 1
        assert delta is None or (delta.is_contiguous() and delta.dtype == hidden.dtype)
        parameters = self._call.parameters
        parameters[kernel.NUM_ROWS], parameters[kernel.SIZE] = hidden.shape
        parameters[kernel.HIDDEN], parameters[kernel.HIDDEN_STRIDE] = hidden.data_ptr(), hidden.stride(0)
        parameters[kernel.DELTA] = 0 if delta is None else delta.data_ptr()
        parameters[kernel.OUTPUT] = 0 if output is None else output.data_ptr()
        parameters[kernel.OUTPUT_STRIDE] = 0 if output is None else output.stride(0)
        self._call.run_over(hidden.numel())


class ResidualSum:
    """Adds what a part of a layer computed, times ``scale``, to the residual stream."""

    def __init__(self, scale: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self._scale = scale
        self._compiled = _CompiledPass(dtype, scale, NormSpec()) if device.type == "cpu" else None

    def __call__(self, hidden: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Add ``delta`` to ``hidden`` in place; both [num_tokens, size], contiguous."""
        if self._compiled is None:
            return hidden.add_(delta, alpha=self._scale)
        self._compiled(hidden, delta, None)
        return hidden


class LayerNorm:
    """Scales vectors to zero mean and unit variance, then by a learnt weight, and adds a learnt bias."""

    def __init__(
        self, size: int, *, spec: NormSpec, dtype: torch.dtype, device: torch.device, delta_scale: float = 1.0
    ) -> None:
        self.weight, self.bias = torch.empty(2, size, dtype=dtype, device=device)
        self.spec = spec
        self._delta_scale = delta_scale
        self._compiled: _CompiledPass | None = None
        if device.type == "cpu":
            self._compiled = _CompiledPass(dtype, delta_scale, spec, self.weight, self.bias)

    def targets(self, name: str) -> dict[str, torch.Tensor]:
        """Where the tensors of the norm called ``name`` are loaded."""
        return {f"{name}.weight": self.weight, f"{name}.bias": self.bias}

    def add_and_normalize(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """Add ``delta`` to ``hidden`` in place, and return the normalised sum; both [num_tokens, size]."""
        if self._compiled is not None:
            assert hidden.is_contiguous()
            assert hidden.dtype == self.weight.dtype
            output = torch.empty_like(hidden)
            self._compiled(hidden, delta, output)
            return output
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

    ``before`` adds to the residual stream like ``add``, in the same pass.
    """

    def __init__(self, *, before: Norm | None, after: Norm | None, add: ResidualSum) -> None:
        self.before, self.after = before, after
        self._add = add

    def enter(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """Add ``delta``, the previous part's result, to the residual stream ``hidden`` in place; both [num_tokens,
        hidden_size]. Returns the input of this part, which must not be written to.
        """
        if self.before is not None:
            return self.before.add_and_normalize(hidden, delta)
        return hidden if delta is None else self._add(hidden, delta)

    def leave(self, result: torch.Tensor) -> torch.Tensor:
        """What this part adds to the residual stream, given its result."""
        return result if self.after is None else self.after.add_and_normalize(result, None)
