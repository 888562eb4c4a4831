"""Matrix products with weights in the fastest layout for this machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch.nn import functional as F

from engine.contract.step import IntArray
from engine.layers.panel_weight import PanelWeight, fits_panels

Multiply = Callable[[torch.Tensor], torch.Tensor]

EXPECTED_NUM_TOKENS = 32
"""The batch size for which oneDNN chooses its layout. Measured with 1, 32 and 512: this one is within a tenth of the
best at 1 to 512 tokens."""

MAX_EXACT_TOKENS = 32
"""Products of more tokens are padded to a rounded number of tokens, see ``_rounded``."""

PROBE_SIZE = 64


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
    """A function that multiplies by ``weight`` [out_size, in_size], transposed, and adds ``bias``.

    The weight is stored in panels if these are faster (``PanelWeight``) and its sizes fit.
    On the CPU oneDNN reorders the weight once: for bfloat16 2 to 3 times the speed of ``F.linear`` at 1 to 64 tokens,
    for float32 1.2 to 3 times from 8 tokens on. The caller may drop its reference to ``weight``.
    """
    if fits_panels(weight):
        return PanelWeight(weight, bias)
    if weight.device.type == "cpu" and can_pack(weight.dtype):
        packed = _ops().reorder(weight, EXPECTED_NUM_TOKENS)
        return partial(_multiply_packed, packed, bias)
    return partial(F.linear, weight=weight, bias=bias)


def best_columns(multiply: Multiply, x: torch.Tensor) -> IntArray | None:
    """The column of the highest number in each row of a product, the first of equal ones, [num_rows].

    Returns:
        None if a number is NaN, or if products with this weight cannot be searched (``can_find_best``).
    """
    return multiply.best_columns(x) if isinstance(multiply, PanelWeight) and multiply.finds_best else None


def can_find_best(multiply: Multiply | None) -> bool:
    """True if ``best_columns`` can search products with this weight: those of panels."""
    return isinstance(multiply, PanelWeight) and multiply.finds_best


class _Operators:
    """torch's operators for packed weights. They are private: any failure here counts as their absence."""

    def __init__(self) -> None:
        self.reorder = torch.ops.mkldnn._reorder_linear_weight
        self.multiply = torch.ops.mkldnn._linear_pointwise


@cache
def _ops() -> _Operators:
    return _Operators()


def _multiply_packed(packed: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    num_tokens = x.shape[0]
    num_added = _rounded(num_tokens) - num_tokens
    if num_added:
        x = F.pad(x, (0, 0, 0, num_added))
    result: torch.Tensor = _ops().multiply(x, packed, bias, "none", [], "")
    return result[:num_tokens] if num_added else result


def _rounded(num_tokens: int) -> int:
    """The number of tokens that a product is padded to: at most an eighth more.

    oneDNN makes a kernel for each number of tokens, in half a millisecond, and keeps half a megabyte for it. Prompts of
    all lengths would need thousands of kernels, so only eight numbers between a power of two and the next are used.
    """
    if num_tokens <= MAX_EXACT_TOKENS:
        return num_tokens
    unit = 1 << (num_tokens.bit_length() - 4)
    return -(-num_tokens // unit) * unit


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """True if this machine has a packed product for a dtype that is worth it and gives the plain product's results."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch._C._has_mkldnn:
        return False
    weight = torch.linspace(-1.0, 1.0, PROBE_SIZE * PROBE_SIZE).view(PROBE_SIZE, PROBE_SIZE).to(dtype)
    try:
        packed = _multiply_packed(_ops().reorder(weight, EXPECTED_NUM_TOKENS), None, weight)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    return torch.allclose(packed, F.linear(weight, weight), atol=tolerance, rtol=tolerance)
