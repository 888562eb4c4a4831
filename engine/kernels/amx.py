"""AMX, the matrix units of Intel's CPUs: a product of two tiles is one instruction, built for LLVM.

A tile has up to 16 rows of 64 bytes. ``dot`` multiplies 16 rows of 32 bfloat16 with 16 rows of 16 pairs of bfloat16,
and adds the products to 16 rows of 16 float32. Rows lie a stride apart in memory. A thread sets the sizes of its eight
tiles before it uses them, and gives them up afterwards. Source: Intel, Architecture Instruction Set Extensions, AMX.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

TILE_ROWS = 16
TILE_BYTES = 64
"""Bytes of a tile's row."""

TILE_WORDS = 16
"""Words of a tile's row: single float32, or pairs of bfloat16."""

NUM_TILES = 8

SIZES_BYTES = 64
_WIDTHS, _HEIGHTS = 16, 48
"""Where the tiles' bytes per row (uint16) and rows (uint8) begin in the description of their sizes."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""The numbers by which Linux is asked to let a process use tiles."""

_I8 = ir.IntType(8)
_BYTES = _I8.as_pointer()


@cache
def has_tiles() -> bool:
    """True if this CPU multiplies tiles of bfloat16, and the system lets this process use them."""
    if sys.platform != "linux" or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    features = binding.get_host_cpu_features()
    if not all(features.get(name, False) for name in ("amx-tile", "amx-bf16", "avx512bf16")):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def tile_sizes(heights: dict[int, int]) -> npt.NDArray[np.uint8]:
    """The description of tiles for ``set_tiles``: rows of 64 bytes, ``TILE_ROWS`` of them or ``heights[tile]``."""
    sizes = np.zeros(SIZES_BYTES, dtype=np.uint8)
    sizes[0] = 1  # the only palette of sizes that CPUs know
    sizes[_WIDTHS : _WIDTHS + 2 * NUM_TILES].view(np.uint16)[:] = TILE_BYTES
    sizes[_HEIGHTS : _HEIGHTS + NUM_TILES] = [heights.get(tile, TILE_ROWS) for tile in range(NUM_TILES)]
    return sizes


class Tiles:
    """Emits operations on tiles at the builder's place in a function. Addresses and strides are int64."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder

    def clear(self, tile: int) -> None:
        """Set all numbers to zero."""
        self._call("tilezero", _number(tile))

    def load(self, tile: int, address: Any, stride: Any) -> None:
        """Load rows that are ``stride`` bytes apart."""
        self._call("tileloadd64", _number(tile), self._builder.inttoptr(address, _BYTES), stride)

    def store(self, tile: int, address: Any, stride: Any) -> None:
        """Store rows ``stride`` bytes apart."""
        self._call("tilestored64", _number(tile), self._builder.inttoptr(address, _BYTES), stride)

    def dot(self, total: int, x: int, w: int) -> None:
        """total += x @ w, for rows of bfloat16 in x and rows of pairs in w."""
        self._call("tdpbf16ps", _number(total), _number(x), _number(w))

    def _call(self, name: str, *arguments: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        function = self._builder.module.declare_intrinsic(f"llvm.x86.{name}", (), kind)
        self._builder.call(function, arguments)


@intrinsic
def set_tiles(typing_context: Any, sizes: Any) -> Any:
    """Set the sizes of this thread's tiles to those at an address; see ``tile_sizes``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        Tiles(builder)._call("ldtilecfg", builder.inttoptr(arguments[0], _BYTES))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def release_tiles(typing_context: Any) -> Any:
    """Give up this thread's tiles: the system then saves less when it switches threads."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        Tiles(builder)._call("tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


def _number(tile: int) -> Any:
    return ir.Constant(_I8, tile)
