"""The first of the highest columns of each row of a product, found while the product is computed.

For a decode step in which every row takes its most likely token nobody else reads the logits. Written and then searched
they cross the memory twice, which takes as long as everything else besides the model. So each thread keeps, for every
row and every place in a panel, the highest number that it met there and the panel that held it; at the end the threads
agree on the row's best. Numbers are compared as they would be stored, by their ranks (``machine_code.rank``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.kernels.compiled import PART_OPTIONS
from engine.kernels.lanes import integer
from engine.kernels.loops import walk
from engine.kernels.machine_code import raise_to, ranks_of, ranks_type
from engine.kernels.products.tile_product import PANEL

COLUMN_BITS = 32
LOWEST_KEY = np.iinfo(np.int64).min
"""Below the key of every column."""


@intrinsic
def keep_best(
    typing_context: Any, numbers: Any, stride: Any, num_rows: Any, leaders: Any, panel: Any, like: Any
) -> Any:
    """Compare a panel's columns of so many rows, at least one, with the best of earlier panels.

    numbers: address of stored numbers of the type of ``like``, [num_rows, PANEL], rows ``stride`` bytes apart; leaders:
        address of [num_rows, 2, PANEL] ranks and the numbers of their panels, integers as wide as ``like``.
    """
    kind = ranks_type(like)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        numbers, stride, num_rows, leaders, panel, _ = arguments
        width, num_bytes = ir.IntType(kind.bitwidth), kind.bitwidth // 8
        vector = ir.VectorType(width, PANEL)
        number = panel if kind == types.int64 else b.trunc(panel, width)
        unset = ir.Constant(vector, ir.Undefined)
        first = b.insert_element(unset, number, ir.Constant(ir.IntType(32), 0))
        panels = b.shuffle_vector(first, unset, ir.Constant(ir.VectorType(ir.IntType(32), PANEL), [0] * PANEL))

        def row(numbers_at: Any, leaders_at: Any) -> None:
            def place(address: Any) -> Any:
                return b.inttoptr(address, vector.as_pointer())

            ranks = ranks_of(b, b.load(place(numbers_at), align=num_bytes), like)
            highest_at, panels_at = place(leaders_at), place(b.add(leaders_at, integer(PANEL * num_bytes)))
            highest, held = b.load(highest_at, align=num_bytes), b.load(panels_at, align=num_bytes)
            is_higher = b.icmp_signed(">", ranks, highest)
            b.store(b.select(is_higher, ranks, highest), highest_at, align=num_bytes)
            b.store(b.select(is_higher, panels, held), panels_at, align=num_bytes)

        walks = [(numbers, stride), (leaders, integer(2 * PANEL * num_bytes))]
        walk(b, walks, b.add(numbers, b.mul(num_rows, stride)), row)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, like), generate


@njit(**PART_OPTIONS)
def forget_best(leaders, lowest):
    """Begin: nothing was compared yet. leaders: a flat array for [num_rows, 2, PANEL]."""
    for index in range(len(leaders)):
        leaders[index] = lowest


@njit(**PART_OPTIONS)
def publish_best(leaders, keys, num_rows):
    """Raise the keys of all rows to the best that this thread met. keys: address of [num_rows] int64.

    A key is the rank, and below it the column, inverted: among equal ranks the first column has the highest key.

    Returns:
        The highest rank of any row.
    """
    highest = np.int64(LOWEST_KEY)
    for row in range(num_rows):
        best = np.int64(LOWEST_KEY)
        for lane in range(PANEL):
            at = row * 2 * PANEL + lane
            column = np.int64(leaders[at + PANEL]) * PANEL + lane
            key = (np.int64(leaders[at]) << COLUMN_BITS) | ((~column) & np.int64(0xFFFFFFFF))
            best = key if key > best else best
        raise_to(keys + row * 8, best)
        highest = best if best > highest else highest
    return highest >> COLUMN_BITS


class BestColumns:
    """The keys of a product's rows, and what they tell. ``address``: of the keys of all rows."""

    def __init__(self) -> None:
        self.address = 0
        self._keys = np.empty(0, dtype=np.int64)
        self._columns = self._keys.view(np.int32)

    def begin(self, num_rows: int) -> None:
        """Make room for the keys of so many rows, below those of all columns."""
        if num_rows != len(self._keys):
            self._keys = np.empty(num_rows, dtype=np.int64)
            self.address = self._keys.ctypes.data
            self._columns = self._keys.view(np.int32)[::2]  # the lower halves
        self._keys.fill(LOWEST_KEY)

    def read(self) -> npt.NDArray[np.int32]:
        """The columns of the rows, as an array of their own."""
        columns: npt.NDArray[np.int32] = ~self._columns
        return columns
