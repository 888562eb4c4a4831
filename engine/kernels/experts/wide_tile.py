"""Tiles of a matrix product as high as a machine's registers allow, of whatever height is asked for."""

import numpy as np
from numba import njit

from engine.kernels.compiled import PART_OPTIONS
from engine.kernels.lanes import LANES
from engine.kernels.tile_product import tile_product

PANEL = 2 * LANES
"""Columns of a panel: two registers."""

MAX_ROWS = 12 if LANES == 16 else 6
"""Rows whose sums are in registers together, beside two of the weight and one of the input."""

_FLOAT = np.float32(0.0)

_tiles = [tile_product(height, prefetches=True, panel_size=PANEL) for height in range(1, 13)]
_tile_1, _tile_2, _tile_3, _tile_4, _tile_5, _tile_6 = _tiles[:6]
_tile_7, _tile_8, _tile_9, _tile_10, _tile_11, _tile_12 = _tiles[6:]


@njit(**PART_OPTIONS)
def _low_tile(height, x, x_stride, panel, in_size, bias, y, y_stride, weight):
    if height == 6:
        _tile_6(x, x_stride, panel, in_size, bias, y, y_stride, weight, _FLOAT)
    elif height == 5:
        _tile_5(x, x_stride, panel, in_size, bias, y, y_stride, weight, _FLOAT)
    elif height == 4:
        _tile_4(x, x_stride, panel, in_size, bias, y, y_stride, weight, _FLOAT)
    elif height == 3:
        _tile_3(x, x_stride, panel, in_size, bias, y, y_stride, weight, _FLOAT)
    elif height == 2:
        _tile_2(x, x_stride, panel, in_size, bias, y, y_stride, weight, _FLOAT)
    else:
        _tile_1(x, x_stride, panel, in_size, bias, y, y_stride, weight, _FLOAT)


@njit(**PART_OPTIONS)
def _high_tile(height, x, x_stride, panel, in_size, bias, y, y_stride, weight):
    if height == 12:
        _tile_12(x, x_stride, panel, in_size, bias, y, y_stride, weight, _FLOAT)
    elif height == 11:
        _tile_11(x, x_stride, panel, in_size, bias, y, y_stride, weight, _FLOAT)
    elif height == 10:
        _tile_10(x, x_stride, panel, in_size, bias, y, y_stride, weight, _FLOAT)
    elif height == 9:
        _tile_9(x, x_stride, panel, in_size, bias, y, y_stride, weight, _FLOAT)
    elif height == 8:
        _tile_8(x, x_stride, panel, in_size, bias, y, y_stride, weight, _FLOAT)
    else:
        _tile_7(x, x_stride, panel, in_size, bias, y, y_stride, weight, _FLOAT)


@njit(**PART_OPTIONS)
def _any_tile(height, x, x_stride, panel, in_size, bias, y, y_stride, weight):
    if height > 6:
        _high_tile(height, x, x_stride, panel, in_size, bias, y, y_stride, weight)
    else:
        _low_tile(height, x, x_stride, panel, in_size, bias, y, y_stride, weight)


wide_tile = _any_tile if MAX_ROWS > 6 else _low_tile
"""``height`` rows of float32 at ``x`` times a panel, plus the bias, as float32 at ``y``; see ``tile_product``."""
