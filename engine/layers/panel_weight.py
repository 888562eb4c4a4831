"""A weight in panels, for CPUs on which our own product is faster than the matrix library."""

from __future__ import annotations

import platform
from functools import cache, partial

import numpy as np
import torch
from llvmlite import binding

from engine.contract.step import EMPTY_INTS, IntArray
from engine.device.huge_pages import WEIGHTS
from engine.kernels import row_copies
from engine.kernels.amx import has_tiles
from engine.kernels.call import KernelCall, threads_for
from engine.kernels.products import amx_product
from engine.kernels.products import panel_product as kernel
from engine.kernels.products.best_columns import LOWEST_KEY, MOST_PANELS
from engine.kernels.products.tile_product import MAX_ROWS, PANEL, UNROLLED, WORD_BYTES

PAIRS = "bfloat16 pairs"
ALIAS_BYTES = 4096
"""Rows this far apart share a place in the L1 cache, which has room for 8 or 12 such rows."""

LINE_BYTES = 64


class PanelWeight:
    """Multiplies by ``weight`` [out_size, in_size], transposed, and adds ``bias``.

    Products are summed in float32, and rounded once. float32 weights that are exact in bfloat16, such as those of a
    bfloat16 checkpoint, are stored as bfloat16: the result is the same, with half the memory traffic. bfloat16 is
    stored in pairs if the CPU multiplies tiles of pairs, or pairs faster than float32.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._out_size, in_size = weight.shape
        self._dtype = weight.dtype
        is_bfloat16, stored = weight.dtype is torch.bfloat16, narrowest_exact(weight)
        self._in_tiles = is_bfloat16 and in_size % amx_product.STEP_INPUTS == 0 and has_tiles()
        has_pairs = self._in_tiles or (is_bfloat16 and multiplies_pairs())
        self._input_dtype = torch.bfloat16 if has_pairs else torch.float32
        in_word = WORD_BYTES // self._input_dtype.itemsize
        num_panels, num_words = self._out_size // PANEL, in_size // in_word
        self._panels = WEIGHTS.empty(num_panels, num_words, PANEL, in_word, dtype=stored)
        self._panels.copy_(weight.view(num_panels, PANEL, num_words, in_word).transpose(1, 2))
        self._bias = torch.zeros(self._out_size) if bias is None else bias.float()
        if self._in_tiles:
            compiled = partial(amx_product.compiled_amx_product)  # binds nothing, but is a ``Kernel``
        else:
            compiled = partial(kernel.compiled_product, PAIRS if has_pairs else _name(stored), _name(weight.dtype))
        self._call = KernelCall(compiled, kernel.NUM_PARAMETERS, rows_at=kernel.NUM_ROWS)
        self._max_threads = threads_for(self._panels.numel())
        self._best = _BestColumns()
        self._copy = None if self._in_tiles else _RowCopy(weight.dtype, self._input_dtype)
        parameters = self._call.parameters
        parameters[kernel.PANELS], parameters[kernel.BIAS] = self._panels.data_ptr(), self._bias.data_ptr()
        parameters[kernel.NUM_WORDS], parameters[kernel.OUT_SIZE] = num_words, self._out_size
        parameters[kernel.TILE_SIZES] = amx_product.SIZES.ctypes.data

    @property
    def num_bytes(self) -> int:
        """Bytes that the weight takes."""
        return self._panels.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_rows, in_size] to [num_rows, out_size], of the weight's dtype."""
        output = torch.empty(x.shape[0], self._out_size, dtype=self._dtype)
        parameters = self._call.parameters
        parameters[kernel.OUTPUT], parameters[kernel.BEST] = output.data_ptr(), 0
        self._run(x)
        return output

    @property
    def finds_best(self) -> bool:
        """True if ``best_columns`` can search the products; one of more than a million columns it may not."""
        return self._out_size // PANEL <= MOST_PANELS[self._dtype.itemsize]

    def best_columns(self, x: torch.Tensor) -> IntArray | None:
        """The column of the highest number in each row of the product, the first of equal ones; [num_rows] int32.

        The numbers are those of ``__call__``, which are not written anywhere.

        Returns:
            None if any of them is NaN.
        """
        if not len(x):
            return EMPTY_INTS
        best, parameters = self._best, self._call.parameters
        best.begin(len(x))
        parameters[kernel.BEST], parameters[kernel.HAS_NAN] = best.address, 0
        self._run(x)
        return None if parameters[kernel.HAS_NAN] else best.read()

    def _run(self, x: torch.Tensor) -> None:
        num_rows, stride = x.shape[0], x.stride(0)
        competes = num_rows >= MAX_ROWS and stride * self._input_dtype.itemsize % ALIAS_BYTES == 0
        if x.dtype is not self._input_dtype or x.stride(1) != 1 or (competes and not self._in_tiles):
            x = self._copied(x)
            stride = x.stride(0)
        parameters = self._call.parameters
        parameters[kernel.INPUT] = x.data_ptr()
        parameters[kernel.NUM_ROWS], parameters[kernel.INPUT_STRIDE] = num_rows, stride * x.itemsize
        self._call.run(max_threads=self._max_threads)

    def _copied(self, x: torch.Tensor) -> torch.Tensor:
        """An input in rows that suit the product."""
        num_rows, size = x.shape
        rows = rows_for_product(num_rows, size, self._input_dtype)
        if self._copy is None or x.dtype is not self._dtype or x.stride(1) != 1:
            return rows.copy_(x)
        self._copy(x, rows)
        return rows


class _BestColumns:
    """The keys of a product's rows, which the kernel raises to those of their best columns; see the kernel's module."""

    def __init__(self) -> None:
        self.address = 0
        self._keys = np.empty(0, dtype=np.int64)
        self._columns = self._keys.view(np.int32)

    def begin(self, num_rows: int) -> None:
        """Prepare so many keys at ``address``, each lower than any column's."""
        if num_rows != len(self._keys):
            self._keys = np.empty(num_rows, dtype=np.int64)
            self.address = self._keys.ctypes.data
            self._columns = self._keys.view(np.int32)[::2]  # the lower halves
        self._keys.fill(LOWEST_KEY)

    def read(self) -> IntArray:
        """The columns of the rows, as an array of their own."""
        columns: IntArray = ~self._columns
        return columns


class _RowCopy:
    """Copies rows of one dtype to rows of another. torch's copy would do, but could not be recorded (``CallList``)."""

    def __init__(self, from_dtype: torch.dtype, to_dtype: torch.dtype) -> None:
        compiled = partial(row_copies.compiled_copy, _name(from_dtype), _name(to_dtype))
        self._call = KernelCall(compiled, row_copies.NUM_COPY_PARAMETERS, rows_at=row_copies.NUM_ROWS)

    def __call__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Both: [num_rows, size]; the numbers of a row are contiguous, rows may be any distance apart."""
        parameters = self._call.parameters
        parameters[row_copies.SOURCE], parameters[row_copies.TARGET] = source.data_ptr(), target.data_ptr()
        parameters[row_copies.NUM_ROWS], parameters[row_copies.SIZE] = source.shape
        parameters[row_copies.SOURCE_STRIDE], parameters[row_copies.TARGET_STRIDE] = source.stride(0), target.stride(0)
        self._call.run_over(source.numel())


def rows_for_product(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate the input of a product on the CPU, [num_rows, size]. It is contiguous, unless weights lie in panels and
    rows would compete for cache places: then rows are padded.
    """
    itemsize = dtype.itemsize
    if num_rows < MAX_ROWS or size * itemsize % ALIAS_BYTES or not suits_panels(dtype):
        return torch.empty(num_rows, size, dtype=dtype)
    return torch.empty(num_rows, size + LINE_BYTES // itemsize, dtype=dtype)[:, :size]


def narrowest_exact(*weights: torch.Tensor) -> torch.dtype:
    """bfloat16 if it represents all these numbers exactly, else their own dtype."""
    dtype = weights[0].dtype
    is_exact = dtype is torch.float32 and all(torch.equal(weight.bfloat16().float(), weight) for weight in weights)
    return torch.bfloat16 if is_exact else dtype


def fits_panels(weight: torch.Tensor) -> bool:
    """True if a weight's sizes fit panels, and panels are worth it on this machine."""
    out_size, in_size = weight.shape
    unit = UNROLLED * WORD_BYTES // (2 if weight.dtype is torch.bfloat16 and multiplies_pairs() else 4)
    if weight.dtype is torch.bfloat16 and has_tiles():
        unit = amx_product.STEP_INPUTS  # oneDNN has tiles for other sizes
    is_even = out_size % PANEL == 0 and in_size % unit == 0 and min(out_size, in_size) > 0
    return is_even and weight.device.type == "cpu" and suits_panels(weight.dtype)


@cache
def suits_panels(dtype: torch.dtype) -> bool:
    """True where oneDNN's products are slower than ours: on x86 with AVX2 and without AVX-512 (0.6 to 0.9 times), and
    with AVX-512 in float32 (0.75 to 1.1 times, 0.45 to 1.1 if the weights are exact in bfloat16) and in bfloat16 (0.65
    to 1.0 times; with AMX 0.45 to 0.95 times for up to 512 rows).
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    features = binding.get_host_cpu_features()
    if not features.get("avx512f", False):
        return all(features.get(name, False) for name in ("avx2", "fma", "f16c"))
    return dtype in (torch.float32, torch.bfloat16)


def multiplies_pairs() -> bool:
    """True if the CPU multiplies pairs of bfloat16 by AVX-512 instructions faster than float32: on AMD. On Intel only
    half of the units execute these instructions.
    """
    features, name = binding.get_host_cpu_features(), binding.get_host_cpu_name()
    return bool(features.get("avx512bf16", False) and name.startswith("znver"))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
