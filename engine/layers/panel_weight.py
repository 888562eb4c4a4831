"""A weight in panels, for CPUs whose matrix library is slower than our own loop."""

from __future__ import annotations

import platform
from functools import cache, partial

import torch
from llvmlite import binding

from engine.kernels import panel_product as kernel
from engine.kernels.call import KernelCall
from engine.kernels.tile_product import MAX_ROWS, PANEL, UNROLLED, WORD_BYTES

PAIRS = "bfloat16 pairs"
ALIAS_BYTES = 4096
"""Rows so far apart share a place in the caches next to a core, which have room for 8 or 12 of them."""

LINE_BYTES = 64


class PanelWeight:
    """Multiplies by ``weight`` [out_size, in_size], transposed, and adds ``bias``.

    Products are summed in float32, and rounded once. float32 numbers that bfloat16 holds exactly, as those of a
    checkpoint in bfloat16, are kept in it: the result is the same, and half as much is read. Where a CPU multiplies
    pairs of bfloat16 faster than float32, bfloat16 stays in pairs.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._out_size, in_size = weight.shape
        self._dtype = weight.dtype
        stored = weight.to(narrowest_exact(weight))
        has_pairs = weight.dtype is torch.bfloat16 and multiplies_pairs()
        self._input_dtype = torch.bfloat16 if has_pairs else torch.float32
        in_word = WORD_BYTES // self._input_dtype.itemsize
        panels = stored.view(self._out_size // PANEL, PANEL, in_size // in_word, in_word).transpose(1, 2)
        self._panels = panels.contiguous()
        self._bias = torch.zeros(self._out_size) if bias is None else bias.float()
        names = PAIRS if has_pairs else _name(stored.dtype), _name(weight.dtype)
        self._call = KernelCall(partial(kernel.compiled_product, *names), kernel.NUM_PARAMETERS)
        parameters = self._call.parameters
        parameters[kernel.PANELS], parameters[kernel.BIAS] = self._panels.data_ptr(), self._bias.data_ptr()
        parameters[kernel.NUM_WORDS], parameters[kernel.OUT_SIZE] = in_size // in_word, self._out_size

    @property
    def num_bytes(self) -> int:
        """What the weight takes."""
        return self._panels.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_rows, in_size] to [num_rows, out_size], of the weight's dtype."""
        if x.dtype is not self._input_dtype:
            x = x.to(self._input_dtype)
        num_rows, in_size = x.shape
        stride, neighbour = x.stride()
        if neighbour != 1 or (num_rows >= MAX_ROWS and stride * x.itemsize % ALIAS_BYTES == 0):
            x = rows_for_product(x, num_rows, in_size).copy_(x)
            stride = x.stride(0)
        output = torch.empty(num_rows, self._out_size, dtype=self._dtype)
        parameters = self._call.parameters
        parameters[kernel.INPUT], parameters[kernel.OUTPUT] = x.data_ptr(), output.data_ptr()
        parameters[kernel.NUM_ROWS], parameters[kernel.INPUT_STRIDE] = num_rows, stride * x.itemsize
        self._call.run_over(self._panels.numel())
        return output


def rows_for_product(like: torch.Tensor, num_rows: int, size: int) -> torch.Tensor:
    """Room for what a product reads, [num_rows, size], on the CPU: contiguous, or with rows farther apart where that
    is where the caches have room for those of a tile, and weights lie in panels. ``like``: of its dtype.
    """
    itemsize = like.itemsize
    if num_rows < MAX_ROWS or size * itemsize % ALIAS_BYTES or not suits_panels(like.dtype):
        return torch.empty(num_rows, size, dtype=like.dtype)
    return torch.empty(num_rows, size + LINE_BYTES // itemsize, dtype=like.dtype)[:, :size]


def narrowest_exact(*weights: torch.Tensor) -> torch.dtype:
    """bfloat16 if it holds all these numbers exactly, else their own dtype."""
    dtype = weights[0].dtype
    is_exact = dtype is torch.float32 and all(torch.equal(weight.bfloat16().float(), weight) for weight in weights)
    return torch.bfloat16 if is_exact else dtype


def fits_panels(weight: torch.Tensor) -> bool:
    """True when a weight can lie in panels, and this machine is one on which that is worth it."""
    out_size, in_size = weight.shape
    unit = UNROLLED * WORD_BYTES // (2 if weight.dtype is torch.bfloat16 and multiplies_pairs() else 4)
    is_even = out_size % PANEL == 0 and in_size % unit == 0 and min(out_size, in_size) > 0
    return is_even and weight.device.type == "cpu" and suits_panels(weight.dtype)


@cache
def suits_panels(dtype: torch.dtype) -> bool:
    """True where oneDNN's products are slower than ours: on x86 with AVX2 and without AVX-512 (0.6 to 0.9 times), and
    with AVX-512 in float32 (0.75 to 1.1 times, 0.45 to 1.1 where bfloat16 holds the numbers) and in bfloat16 (0.65 to
    1.0 times) unless AMX multiplies that.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    features = binding.get_host_cpu_features()
    if not features.get("avx512f", False):
        return all(features.get(name, False) for name in ("avx2", "fma", "f16c"))
    return dtype is torch.float32 or (dtype is torch.bfloat16 and not features.get("amx-bf16", False))


def multiplies_pairs() -> bool:
    """True where instructions of AVX-512 multiply pairs of bfloat16 faster than others do float32: in CPUs of AMD. In
    Intel's only half of the units take them.
    """
    features, name = binding.get_host_cpu_features(), binding.get_host_cpu_name()
    return bool(features.get("avx512bf16", False) and name.startswith("znver"))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
