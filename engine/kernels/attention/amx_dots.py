"""Products of attention over runs on CPUs with AMX: a tile of rows with the packed keys or values of a tile."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from engine.kernels.amx import TILE_BYTES, TILE_ROWS, Tiles
from engine.kernels.lanes import FLOAT_BYTES, integer
from engine.kernels.loops import walk

SIDE = 4
"""Tiles of columns side by side: fewer would wait for their sums."""

_X, _W = 4, 6
"""The first tiles of x and w; tiles 0 to 3 hold the sums."""


def _multiply(*, adds: bool) -> Any:
    """``multiply(x, x_stride, w, w_stride, num_words, y, y_stride, num_tiles)``.

    y[TILE_ROWS, TILE_WORDS * num_tiles] = x @ w for ``num_words`` pairs of bfloat16, a multiple of ``TILE_WORDS``;
    added to y with ``adds``. y is float32. All arguments are addresses, strides in bytes, or counts.
    """

    @intrinsic
    def multiply(
        typing_context: Any,
        x: Any,
        x_stride: Any,
        w: Any,
        w_stride: Any,
        num_words: Any,
        y: Any,
        y_stride: Any,
        num_tiles: Any,
    ) -> Any:
        """Compute all columns, ``SIDE`` tiles at a time and the last ones alone."""

        def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            x, x_stride, w, w_stride, num_words, y, y_stride, num_tiles = arguments
            product = _Product(b, (x, x_stride), w_stride, num_words, y_stride, adds=adds)
            in_groups = b.mul(b.sdiv(num_tiles, integer(SIDE)), integer(SIDE * TILE_BYTES))
            all_tiles = b.mul(num_tiles, integer(TILE_BYTES))
            product.columns(w, y, integer(0), in_groups, SIDE)
            product.columns(w, y, in_groups, all_tiles, 1)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return multiply


class _Product:
    """Builds the machine code of one product."""

    def __init__(self, b: Any, x: tuple[Any, Any], w_stride: Any, num_words: Any, y_stride: Any, *, adds: bool) -> None:
        self._b, self._tiles, self._adds = b, Tiles(b), adds
        self._x, self._x_stride = x
        self._w_stride, self._y_stride = w_stride, y_stride
        self._x_bytes = b.mul(num_words, integer(FLOAT_BYTES))

    def columns(self, w: Any, y: Any, start: Any, end: Any, width: int) -> None:
        """Compute the columns from ``start`` to ``end``, in bytes, ``width`` tiles at a time; there may be none."""
        b, step = self._b, integer(width * TILE_BYTES)
        with b.if_then(b.icmp_signed("<", start, end)):
            places = [(b.add(w, start), step), (b.add(y, start), step)]
            walk(b, places, b.add(w, end), lambda w_at, y_at: self._group(w_at, y_at, width))

    def _group(self, w: Any, y: Any, width: int) -> None:
        b, tiles, columns = self._b, self._tiles, range(width)

        def at(address: Any, column: int) -> Any:
            return b.add(address, integer(column * TILE_BYTES))

        def step(x_at: Any, w_at: Any) -> None:
            tiles.load(_X, x_at, self._x_stride)
            for column in columns:
                tiles.load(_W + column % 2, at(w_at, column), self._w_stride)
                tiles.dot(column, _X, _W + column % 2)

        for column in columns:
            if self._adds:
                tiles.load(column, at(y, column), self._y_stride)
            else:
                tiles.clear(column)
        places = [(self._x, integer(TILE_BYTES)), (w, b.mul(self._w_stride, integer(TILE_ROWS)))]
        walk(b, places, b.add(self._x, self._x_bytes), step)
        for column in columns:
            tiles.store(column, at(y, column), self._y_stride)


set_products, add_products = _multiply(adds=False), _multiply(adds=True)
