"""Compiled products of bfloat16 with a weight in panels, for CPUs with AMX.

The weight lies in the panels of ``panel_product``, in pairs. Each sum runs over the input in order, whatever the number
of rows: a row's result does not depend on the rest of the batch. AMX multiplies faster than memory and even the L2
cache deliver. So all rows meet one part of a panel while it lies in the L1 cache, the next part is prefetched
meanwhile, only as many rows are taken as fit the L2 cache, and a large output goes past the caches.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from engine.kernels.amx import (
    SIZES_BYTES,
    TILE_BYTES,
    TILE_ROWS,
    TILE_WORDS,
    Tiles,
    release_tiles,
    set_tiles,
    tile_sizes,
)
from engine.kernels.compiled import BODY_OPTIONS, compile_kernel
from engine.kernels.lanes import FLOAT_BYTES, FLOATS, I32, INTS, integer
from engine.kernels.loops import emit_prefetch, walk
from engine.kernels.machine_code import address_of, take_next
from engine.kernels.products.best_columns import forget_best, keep_best, publish_best
from engine.kernels.products.panel_product import (
    BEST,
    BIAS,
    COUNTER,
    HAS_NAN,
    INPUT,
    INPUT_STRIDE,
    NUM_PARAMETERS,
    NUM_ROWS,
    NUM_WORDS,
    OUT_SIZE,
    OUTPUT,
    PANELS,
    TILE_SIZES,
)
from engine.kernels.products.tile_product import PANEL, WORD_BYTES

STEP_INPUTS = 32
"""Columns of the input that a tile holds; the input has a multiple of it."""

STEP_BYTES = TILE_ROWS * 2 * TILE_BYTES
"""Bytes of a panel for one step: two tiles, side by side."""

PART_STEPS = 8
"""Steps between two visits of the same sums: such a part of a panel takes a third of the L1 cache. Of 4 to 24, this one
is the fastest for 64 rows and more."""

CHUNK_BYTES = 1 << 20
"""Bytes of the input that go through all panels before the next rows: they stay in a core's L2 cache."""

STREAMED_BYTES = 1 << 19
"""From this size on, the output goes past the caches: lines that are written whole are not read before."""

LOOK_AHEAD = 4096
"""Bytes of a panel between a step and what it prefetches if the rows fit one block."""

BLOCK_ROWS = 2 * TILE_ROWS
ROW_SUMS = PANEL * FLOAT_BYTES
HALF_SUMS = TILE_ROWS * ROW_SUMS
LINE_BYTES = 64
BFLOAT16 = np.uint16(0)
LOWEST_RANK, NAN_RANK = np.int16(np.iinfo(np.int16).min), np.iinfo(np.int16).max
ROW_LEADERS = 2 * PANEL * 2
"""Bytes of a row's leaders: as many ranks, and numbers of panels, as a panel has columns."""

_COLUMNS = range(2)
"""Tiles of a panel, side by side."""

_X, _W = 4, 6
"""The first tiles of the input and of the weight; tiles 0 to 3 hold the sums."""

SIZES = np.stack([tile_sizes(dict.fromkeys(range(_W), height)) for height in range(TILE_ROWS + 1)])
"""The sizes of tiles for 0 to ``TILE_ROWS`` rows of input and sums; kernels hold its address."""


class _Block:
    """Builds the machine code for the rows of one tile, or of two."""

    def __init__(self, b: Any, num_halves: int) -> None:
        self._b, self._tiles = b, Tiles(b)
        self._halves = range(num_halves)
        self._sums_stride = integer(ROW_SUMS)
        self._all_sums = [2 * half + column for half in self._halves for column in _COLUMNS]

    def begin(self, sums: Any, is_first: Any) -> None:
        """Clear the sums, or load those of the steps before."""
        b = self._b
        with b.if_else(b.icmp_signed("!=", is_first, integer(0))) as (first, later):
            with first:
                for tile in self._all_sums:
                    self._tiles.clear(tile)
            with later:
                for tile in self._all_sums:
                    self._tiles.load(tile, self._place(sums, tile), self._sums_stride)

    def step(self, x: Any, more: Any, x_stride: Any, panel: Any) -> None:
        """Add the products of one step."""
        b, tiles = self._b, self._tiles
        for half in self._halves:
            for column in _COLUMNS:
                if half == 0:
                    tiles.load(_W + column, b.add(panel, integer(column * TILE_BYTES)), self._sums_stride)
                if column == 0:
                    tiles.load(_X + half, b.add(x, more) if half else x, x_stride)
                tiles.dot(2 * half + column, _X + half, _W + column)

    def end(self, sums: Any) -> None:
        """Store the sums."""
        for tile in self._all_sums:
            self._tiles.store(tile, self._place(sums, tile), self._sums_stride)

    def _place(self, sums: Any, tile: int) -> Any:
        return self._b.add(sums, integer(tile // 2 * HALF_SUMS + tile % 2 * TILE_BYTES))


def _multiply_steps(num_halves: int) -> Any:
    """``steps(x, more, x_stride, panel, num_steps, sums, is_first, ahead, ahead_bytes)`` for rows of ``num_halves``
    tiles; those of the second one are ``more`` bytes behind.

    sums: [BLOCK_ROWS, PANEL] float32, with ``is_first`` only written. ahead: what to prefetch, ``ahead_bytes`` a step.
    """

    @intrinsic
    def steps(
        typing_context: Any,
        x: Any,
        more: Any,
        x_stride: Any,
        panel: Any,
        num_steps: Any,
        sums: Any,
        is_first: Any,
        ahead: Any,
        ahead_bytes: Any,
    ) -> Any:
        """Multiply so many steps of the input."""

        def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            x, more, x_stride, panel, num_steps, sums, is_first, ahead, ahead_bytes = arguments
            block = _Block(b, num_halves)

            def step(x_at: Any, panel_at: Any, ahead_at: Any) -> None:
                block.step(x_at, more, x_stride, panel_at)
                lines = [(ahead_at, integer(LINE_BYTES))]
                walk(b, lines, b.add(ahead_at, ahead_bytes), lambda line: emit_prefetch(b, line, 2))

            block.begin(sums, is_first)
            walks = [(x, integer(TILE_BYTES)), (panel, integer(STEP_BYTES)), (ahead, ahead_bytes)]
            walk(b, walks, b.add(x, b.mul(num_steps, integer(TILE_BYTES))), step)
            block.end(sums)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return steps


def _finish_rows(*, streams: bool) -> Any:
    """``finish(sums, bias, y, y_stride, num_rows)``: y = sums + bias, rounded; ``streams``: past the caches."""

    @intrinsic
    def finish(typing_context: Any, sums: Any, bias: Any, y: Any, y_stride: Any, num_rows: Any) -> Any:
        """Finish so many rows of a panel's columns."""

        def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            sums, bias, y, y_stride, num_rows = arguments

            def load(address: Any, half: int) -> Any:
                place = b.add(address, integer(half * TILE_BYTES))
                return b.load(b.inttoptr(place, FLOATS.as_pointer()), align=FLOAT_BYTES)

            biases = [load(bias, half) for half in _COLUMNS]
            kind = ir.FunctionType(INTS, [FLOATS, FLOATS])
            pack = ir.InlineAsm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v")

            def row(sums_at: Any, y_at: Any) -> None:
                low, high = (b.fadd(load(sums_at, half), biases[half]) for half in _COLUMNS)
                place = b.inttoptr(y_at, INTS.as_pointer())
                store = b.store(b.call(pack, [low, high]), place, align=LINE_BYTES if streams else 2)
                if streams:
                    store.set_metadata("nontemporal", b.module.add_metadata([ir.Constant(I32, 1)]))

            walk(b, [(sums, integer(ROW_SUMS)), (y, y_stride)], b.add(sums, b.mul(num_rows, integer(ROW_SUMS))), row)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return finish


@intrinsic
def publish_streamed(typing_context: Any) -> Any:
    """Wait until what went past the caches is visible to other threads."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        b.call(b.module.declare_intrinsic("llvm.x86.sse.sfence", (), kind), [])
        return context.get_dummy_value()

    return types.void(), generate


multiply_one, multiply_both = _multiply_steps(1), _multiply_steps(2)
finish_rows, stream_rows = _finish_rows(streams=False), _finish_rows(streams=True)


@njit(**BODY_OPTIONS)
def _multiply_panel(p, index, row, end, sums, leaders, streams):
    """Rows ``row`` to ``end`` of the input times one panel, part by part. The last tiles of rows overlap with those
    before them, so that they are whole; only an input of fewer rows than a tile has smaller ones. leaders: see
    ``keep_best``; of all rows.
    """
    num_rows, x_stride, y_stride, all_steps = p[NUM_ROWS], p[INPUT_STRIDE], 2 * p[OUT_SIZE], p[NUM_WORDS] // TILE_WORDS
    panel = p[PANELS] + index * all_steps * STEP_BYTES
    last_tile, height = max(num_rows - TILE_ROWS, 0), min(num_rows, TILE_ROWS)
    num_blocks = (end - row + BLOCK_ROWS - 1) // BLOCK_ROWS
    most_steps = all_steps if num_blocks == 1 else PART_STEPS
    ahead_bytes = (STEP_BYTES // LINE_BYTES + num_blocks - 1) // num_blocks * LINE_BYTES
    for start in range(0, all_steps, most_steps):
        num_steps = min(most_steps, all_steps - start)
        is_first, is_last = np.int64(start == 0), start + num_steps == all_steps
        part = panel + start * STEP_BYTES
        ahead = part + (LOOK_AHEAD if num_blocks == 1 else num_steps * STEP_BYTES)
        for block in range(num_blocks):
            first = min(row + block * BLOCK_ROWS, last_tile)
            second = min(row + block * BLOCK_ROWS + TILE_ROWS, last_tile)
            x = p[INPUT] + first * x_stride + start * TILE_BYTES
            more, at = (second - first) * x_stride, sums + 2 * block * HALF_SUMS
            if second > first:
                multiply_both(x, more, x_stride, part, num_steps, at, is_first, ahead, ahead_bytes)
            else:
                multiply_one(x, more, x_stride, part, num_steps, at, is_first, ahead, ahead_bytes)
            ahead += num_steps * ahead_bytes
            if is_last:
                y, bias = p[OUTPUT] + index * PANEL * 2, p[BIAS] + index * ROW_SUMS
                for half in range(1 + (second > first)):
                    to_row, sums_at = second if half else first, at + half * HALF_SUMS
                    if p[BEST] != 0:
                        finish_rows(sums_at, bias, sums_at, ROW_SUMS, height)  # in place
                        keep_best(sums_at, ROW_SUMS, height, leaders + to_row * ROW_LEADERS, index, BFLOAT16)
                    elif streams:
                        stream_rows(sums_at, bias, y + to_row * y_stride, y_stride, height)
                    else:
                        finish_rows(sums_at, bias, y + to_row * y_stride, y_stride, height)


@njit(**BODY_OPTIONS)
def _run(p):
    """Take panels from the shared counter: all panels for the first chunk of rows, then all for the next."""
    num_rows, num_panels = p[NUM_ROWS], p[OUT_SIZE] // PANEL
    if num_rows == 0:
        return  # no sizes of tiles are valid for it
    most_rows = max(CHUNK_BYTES // (WORD_BYTES * p[NUM_WORDS]) // BLOCK_ROWS, 1) * BLOCK_ROWS
    num_chunks = (num_rows + most_rows - 1) // most_rows
    rows = (num_rows + num_chunks * BLOCK_ROWS - 1) // (num_chunks * BLOCK_ROWS) * BLOCK_ROWS
    num_chunks = (num_rows + rows - 1) // rows
    streams = 2 * num_rows * p[OUT_SIZE] >= STREAMED_BYTES and p[BEST] == 0
    leaders = np.empty(2 * PANEL * num_rows if p[BEST] != 0 else 0, np.int16)
    forget_best(leaders, LOWEST_RANK)
    room = np.empty(rows * PANEL + LINE_BYTES // FLOAT_BYTES, np.float32)
    set_tiles(p[TILE_SIZES] + min(num_rows, TILE_ROWS) * SIZES_BYTES)
    item = take_next(p[COUNTER])
    while item < num_panels * num_chunks:
        row = item // num_panels * rows
        sums = (
            (address_of(room) + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES
        )  # here, since numba frees what is not used
        best_at = address_of(leaders)
        _multiply_panel(p, item % num_panels, row, min(row + rows, num_rows), sums, best_at, streams)
        item = take_next(p[COUNTER])
    release_tiles()
    if p[BEST] != 0 and publish_best(leaders, p[BEST], num_rows) == NAN_RANK:
        p[HAS_NAN] = 1
    if streams:
        publish_streamed()


@cache
def compiled_amx_product():
    """The address of ``void product(int64 *parameters)``, with the parameters of ``panel_product``.

    The input is bfloat16, ``NUM_WORDS`` pairs a row, a multiple of ``TILE_WORDS``. TILE_SIZES is the address of
    ``SIZES``. The output is bfloat16 and starts at a cache line.
    """

    def product(address):
        _run(carray(address, (NUM_PARAMETERS,), dtype=np.int64))

    return compile_kernel(product)
