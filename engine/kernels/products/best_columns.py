"""The first of the highest columns of each row of a product, found while the product is computed.

For a decode step in which every row takes its most likely token nobody else reads the logits. Written and then searched
they cross the memory twice, which takes as long as everything else besides the model. So each thread keeps, for every
row and every place in a panel, the highest number that it met there and the panel that held it; at the end the threads
agree on the row's best. Numbers are compared as they would be stored, by their ranks (``machine_code.rank``).

A column's key is its rank, and below it the column, inverted: among equal ranks the first column has the highest key.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.kernels.compiled import PART_OPTIONS
from engine.kernels.lanes import integer
from engine.kernels.loops import walk
from engine.kernels.machine_code import raise_to, ranks_of, ranks_type
from engine.kernels.products.tile_product import PANEL

COLUMN_BITS = 32
MOST_PANELS = {2: 1 << 15, 4: 1 << 31}
"""How many panels can be told apart, by the bytes of a stored number: their numbers are as wide as ranks."""

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
        unset = ir.Constant(vector, ir.Undefined)
        first = b.insert_element(unset, b.trunc(panel, width), ir.Constant(ir.IntType(32), 0))
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
    """Set all ranks to the lowest: nothing was compared yet. leaders: a flat array for [num_rows, 2, PANEL]."""
    for index in range(len(leaders)):
        leaders[index] = lowest


@njit(**PART_OPTIONS)
def publish_best(leaders, keys, num_rows):
    """Raise the keys of all rows to the best that this thread met. keys: address of [num_rows] int64.

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
