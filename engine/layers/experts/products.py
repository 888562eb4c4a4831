"""Matrix products with the weights of many experts, each over its own rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch

from engine.layers.packed_weight import Multiply, pack

logger = logging.getLogger(f"baton.{__name__}")

PROBE_ROWS = 4

GROUPED_ALIGNMENT = 16
"""torch's grouped product requires rows whose size in bytes is a multiple of this."""


class ExpertProducts(Protocol):
    """``rows @ weight.T + bias``, with the weight and bias of each row's expert."""

    def __call__(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """rows: [num_rows, in_size], sorted by their ``experts`` [num_rows]; returns [num_rows, out_size]."""


ExpertsPacker = Callable[[torch.Tensor, torch.Tensor | None], ExpertProducts]
"""A function like ``pack_experts``."""


def pack_experts(weight: torch.Tensor, bias: torch.Tensor | None) -> ExpertProducts:
    """Products with ``weight`` [num_experts, out_size, in_size] and ``bias`` [num_experts, out_size].

    The caller may drop its references to both.
    """
    is_aligned = all(size * weight.itemsize % GROUPED_ALIGNMENT == 0 for size in weight.shape[1:])
    if weight.device.type == "cuda" and is_aligned and has_grouped_product(weight.device, weight.dtype):
        return GroupedProducts(weight, bias)
    if weight.device.type == "cuda" and has_triton_product(weight.device, weight.dtype):
        from engine.layers.experts.triton_product import TritonProducts  # imported late: only GPUs have it

        return TritonProducts(weight, bias)
    min_rows = 1
    if weight.device.type == "cpu":
        _, out_size, in_size = weight.shape
        min_rows = _min_rows(out_size, in_size, weight.dtype, torch.get_num_threads())
    multiply = [pack(matrix, None if bias is None else bias[n]) for n, matrix in enumerate(weight)]
    return ProductsByExpert(multiply, min_rows=min_rows)


class ProductsByExpert:
    """One product for each expert that has rows, in turn. With fewer than ``min_rows`` rows, they are repeated."""

    def __init__(self, multiply: Sequence[Multiply], *, min_rows: int) -> None:
        self._multiply, self._min_rows = multiply, min_rows

    def __call__(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """See ``ExpertProducts``."""
        counts = torch.bincount(experts, minlength=len(self._multiply)).tolist()
        outputs, start = [], 0
        for multiply, count in zip(self._multiply, counts, strict=True):
            if count:
                of_expert = rows[start : start + count]
                if count < self._min_rows:
                    of_expert = of_expert.repeat(self._min_rows, 1)
                outputs.append(multiply(of_expert)[:count])
                start += count
        return torch.cat(outputs)


@cache
def _min_rows(out_size: int, in_size: int, dtype: torch.dtype, num_threads: int) -> int:  # noqa: ARG001  (a key)
    """The smallest number of rows whose product has the same bits as in a larger batch.

    For some sizes oneDNN sums a single row's product in another order; other sizes work with one row.
    """
    generator = torch.Generator().manual_seed(0)
    multiply = pack(torch.randn(out_size, in_size, generator=generator).to(dtype), None)
    rows = torch.randn(PROBE_ROWS, in_size, generator=generator).to(dtype)
    together, alone = multiply(rows), torch.cat([multiply(rows[n : n + 1]) for n in range(PROBE_ROWS)])
    return 1 if torch.equal(together, alone) else 2


class GroupedProducts:
    """All experts in one launch of torch's grouped product; nothing waits for the device."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._numbers = torch.arange(len(weight), device=weight.device)

    def __call__(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """See ``ExpertProducts``."""
        ends = torch.searchsorted(experts, self._numbers, right=True, out_int32=True)
        output = torch._grouped_mm(rows, self._weight.transpose(1, 2), offs=ends)
        return output if self._bias is None else output + self._bias[experts]


@cache
def has_grouped_product(device: torch.device, dtype: torch.dtype) -> bool:
    """True if torch's grouped product exists for a dtype on a device, and gives the same results as plain products."""
    return _is_right(GroupedProducts, device, dtype)


@cache
def has_triton_product(device: torch.device, dtype: torch.dtype) -> bool:
    """True if Triton is installed, compiles for the device, and its product gives the results of plain products."""
    try:
        from engine.layers.experts.triton_product import TritonProducts
    except ImportError:
        return False
    return _is_right(TritonProducts, device, dtype)


def _is_right(products: ExpertsPacker, device: torch.device, dtype: torch.dtype) -> bool:
    rows = torch.linspace(-1.0, 1.0, 64 * 64, device=device).view(64, 64).to(dtype)
    weight = torch.stack((rows, 2 * rows))
    experts = torch.tensor([0] * 40 + [1] * 24, device=device)
    try:
        found = products(weight, None)(rows, experts)
    except Exception as error:  # includes Triton's compiler errors, which have classes of their own
        logger.info("no %s in %s on %s: %s", getattr(products, "__name__", products), dtype, device, error)
        return False
    expected = torch.cat((rows[:40] @ weight[0].T, rows[40:] @ weight[1].T))
    return torch.allclose(found, expected, atol=0.1, rtol=0.1)
