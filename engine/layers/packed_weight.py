"""Matrix products with weights in the layout that the machine's matrix library likes best."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch.nn import functional as F

from engine.layers.panel_weight import PanelWeight, fits_panels

Multiply = Callable[[torch.Tensor], torch.Tensor]

EXPECTED_NUM_TOKENS = 32
"""The batch that oneDNN chooses its layout for. Measured with 1, 32 and 512: this one is within a tenth of the best at
1 to 512 tokens."""

MAX_EXACT_TOKENS = 32
"""Products of more tokens are computed for a rounded number of them, see ``_rounded``."""

PROBE_SIZE = 64


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
    """A function that multiplies by ``weight`` [out_size, in_size], transposed, and adds ``bias``.

    Where panels are faster (``PanelWeight``), and the sizes allow it, the weight is kept in them.
    On the CPU oneDNN reorders the weight once: for bfloat16 2 to 3 times the speed of ``F.linear`` at 1 to 64 tokens,
    for float32 1.2 to 3 times from 8 tokens on. The caller may drop its reference to ``weight``.
    """
    if fits_panels(weight):
        return PanelWeight(weight, bias)
    if weight.device.type == "cpu" and can_pack(weight.dtype):
        packed = _ops().reorder(weight, EXPECTED_NUM_TOKENS)
        return partial(_multiply_packed, packed, bias)
    return partial(F.linear, weight=weight, bias=bias)


class _Operators:
    """torch's operators for packed weights. They are private: whatever fails here means that there are none."""

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
    """For how many tokens a product is computed: an eighth more at most.

    oneDNN makes a kernel for each number of tokens, in half a millisecond, and keeps it in half a megabyte: prompts of
    all lengths would need thousands of them. So there are eight numbers from each power of two to the next.
    """
    if num_tokens <= MAX_EXACT_TOKENS:
        return num_tokens
    unit = 1 << (num_tokens.bit_length() - 4)
    return -(-num_tokens // unit) * unit


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """True when this machine's packed product exists for a dtype, is worth it, and says the same as the plain one."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch._C._has_mkldnn:
        return False
    weight = torch.linspace(-1.0, 1.0, PROBE_SIZE * PROBE_SIZE).view(PROBE_SIZE, PROBE_SIZE).to(dtype)
    try:
        packed = _multiply_packed(_ops().reorder(weight, EXPECTED_NUM_TOKENS), None, weight)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    return torch.allclose(packed, F.linear(weight, weight), atol=tolerance, rtol=tolerance)
