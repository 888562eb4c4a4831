"""A weight in panels, for CPUs whose matrix library is slower than our own loop."""

from __future__ import annotations

import platform
from functools import cache

import torch
from llvmlite import binding

from engine.kernels import panel_product as kernel
from engine.kernels.call import KernelCall
from engine.kernels.tile_product import PANEL, UNROLLED


class PanelWeight:
    """Multiplies by ``weight`` [out_size, in_size], transposed, and adds ``bias``.

    Products are summed in float32, and rounded once. float32 numbers that bfloat16 holds exactly, as those of a
    checkpoint in bfloat16, are kept in it: the result is the same, and half as much is read.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._out_size, self._in_size = weight.shape
        self._dtype = weight.dtype
        stored = weight.to(narrowest_exact(weight))
        panels = stored.view(self._out_size // PANEL, PANEL, self._in_size).transpose(1, 2)
        self._panels = panels.contiguous()
        self._bias = torch.zeros(self._out_size) if bias is None else bias.float()
        address = kernel.compiled_product(_name(stored.dtype), _name(weight.dtype))
        self._call = KernelCall(address, kernel.NUM_PARAMETERS)
        parameters = self._call.parameters
        parameters[kernel.PANELS], parameters[kernel.BIAS] = self._panels.data_ptr(), self._bias.data_ptr()
        parameters[kernel.IN_SIZE], parameters[kernel.OUT_SIZE] = self._in_size, self._out_size

    @property
    def num_bytes(self) -> int:
        """What the weight takes."""
        return self._panels.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_rows, in_size] to [num_rows, out_size], of the weight's dtype."""
        x = x.float().contiguous()
        output = torch.empty(len(x), self._out_size, dtype=self._dtype)
        parameters = self._call.parameters
        parameters[kernel.INPUT], parameters[kernel.OUTPUT] = x.data_ptr(), output.data_ptr()
        parameters[kernel.NUM_ROWS] = len(x)
        self._call.run_over(self._panels.numel())
        return output


def narrowest_exact(*weights: torch.Tensor) -> torch.dtype:
    """bfloat16 if it holds all these numbers exactly, else their own dtype."""
    dtype = weights[0].dtype
    is_exact = dtype is torch.float32 and all(torch.equal(weight.bfloat16().float(), weight) for weight in weights)
    return torch.bfloat16 if is_exact else dtype


def fits_panels(weight: torch.Tensor) -> bool:
    """True when a weight can lie in panels, and this machine is one on which that is worth it."""
    out_size, in_size = weight.shape
    is_even = out_size % PANEL == 0 and in_size % UNROLLED == 0 and min(out_size, in_size) > 0
    return is_even and weight.device.type == "cpu" and suits_panels(weight.dtype)


@cache
def suits_panels(dtype: torch.dtype) -> bool:
    """True where oneDNN's products are slower than ours: on x86 with AVX2 and without AVX-512 (0.6 to 0.9 times), and
    with AVX-512 in float32 (0.75 to 1.1 times, 0.45 to 1.1 where bfloat16 holds the numbers) and in bfloat16 (0.65 to
    1.0 times) unless that is multiplied faster than float32 there.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    features = binding.get_host_cpu_features()
    if not features.get("avx512f", False):
        return all(features.get(name, False) for name in ("avx2", "fma", "f16c"))
    return dtype is torch.float32 or (dtype is torch.bfloat16 and not has_fast_bfloat16())


def has_fast_bfloat16() -> bool:
    """True where a CPU multiplies bfloat16 faster than float32: by AMX, or, those of AMD, by AVX-512. In Intel's, only
    half of the units take such instructions of AVX-512, and AMX may be hidden from a virtual machine.
    """
    features, name = binding.get_host_cpu_features(), binding.get_host_cpu_name()
    return bool(features.get("amx-bf16", False) or (name.startswith("znver") and features.get("avx512bf16", False)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
