"""What multiplies in attention over runs: vector registers, or AMX's tiles. The kernel is compiled for one of them.

The unit is told by the type of an empty array, since numba chooses functions by types: ``IN_LANES`` or ``IN_TILES``.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from engine.kernels.amx import TILE_ROWS, TILE_WORDS, release_tiles, set_tiles
from engine.kernels.attention.amx_dots import add_products, set_products
from engine.kernels.attention.dot_tile import COLUMNS, ROWS, WORD_BYTES, add_tile, set_tile
from engine.kernels.machine_code import address_of

IN_LANES, IN_TILES = np.uint32, np.uint64
_IN_TILES = types.uint64


def rows_of(unit):
    """Rows of queries in a tile."""


@overload(rows_of)
def _choose_rows(unit):
    num_rows = TILE_ROWS if unit.dtype == _IN_TILES else ROWS

    def rows(unit):
        return num_rows

    return rows


def begin(unit, sizes):
    """Prepare a thread; ``sizes`` is the address of the tiles' sizes."""


@overload(begin)
def _choose_begin(unit, sizes):
    del sizes
    return _begin_tiles if unit.dtype == _IN_TILES else _begin_lanes


def _begin_tiles(unit, sizes):
    set_tiles(sizes)


def _begin_lanes(unit, sizes):
    pass


def finish(unit):
    """Give up what ``begin`` took."""


@overload(finish)
def _choose_finish(unit):
    return _finish_tiles if unit.dtype == _IN_TILES else _finish_lanes


def _finish_tiles(unit):
    release_tiles()


def _finish_lanes(unit):
    pass


def score(queries, row, keys, width, scores, unit):
    """Dot products of as many queries as there are rows of scores with the first ``width`` keys of a tile."""


@overload(score)
def _choose_score(queries, row, keys, width, scores, unit):
    del queries, row, keys, width, scores
    return _score_in_tiles if unit.dtype == _IN_TILES else _score_in_lanes


def _score_in_tiles(queries, row, keys, width, scores, unit):
    stride, row_bytes = queries.strides[0], scores.strides[0]
    for start in range(0, len(scores), TILE_ROWS):
        source, target = address_of(queries) + (row + start) * stride, address_of(scores) + start * row_bytes
        num_words, num_tiles = stride // WORD_BYTES, width // TILE_WORDS
        set_products(source, stride, address_of(keys), keys.strides[0], num_words, target, row_bytes, num_tiles)


def _score_in_lanes(queries, row, keys, width, scores, unit):
    stride, row_bytes, num_words = queries.strides[0], scores.strides[0], queries.strides[0] // WORD_BYTES
    for first in range(0, len(scores), ROWS):
        source, into = address_of(queries) + (row + first) * stride, address_of(scores) + first * row_bytes
        for start in range(0, width * WORD_BYTES, COLUMNS * WORD_BYTES):
            packed, target = address_of(keys) + start, into + start
            set_tile(source, stride, packed, keys.strides[0], num_words, target, row_bytes, queries[0, 0])


def add(weights, width, values, sums, row, unit):
    """Add the first ``width`` values of a tile, multiplied by their weights, to as many rows as there are weights."""


@overload(add)
def _choose_add(weights, width, values, sums, row, unit):
    del weights, width, values, sums, row
    return _add_in_tiles if unit.dtype == _IN_TILES else _add_in_lanes


def _add_in_tiles(weights, width, values, sums, row, unit):
    stride, row_bytes = weights.strides[0], sums.strides[0]
    num_words, num_tiles = width * weights.itemsize // WORD_BYTES, sums.shape[1] // TILE_WORDS
    for start in range(0, len(weights), TILE_ROWS):
        source, target = address_of(weights) + start * stride, address_of(sums) + (row + start) * row_bytes
        add_products(source, stride, address_of(values), values.strides[0], num_words, target, row_bytes, num_tiles)


def _add_in_lanes(weights, width, values, sums, row, unit):
    stride, row_bytes, num_words = weights.strides[0], sums.strides[0], width * weights.itemsize // WORD_BYTES
    for first in range(0, len(weights), ROWS):
        source, into = address_of(weights) + first * stride, address_of(sums) + (row + first) * row_bytes
        for start in range(0, row_bytes, COLUMNS * WORD_BYTES):
            packed, target = address_of(values) + start, into + start
            add_tile(source, stride, packed, values.strides[0], num_words, target, row_bytes, weights[0, 0])
