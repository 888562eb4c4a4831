"""The innermost loop of attention over chunks: a tile of dot products whose sums stay in registers, as machine code.

A word is four bytes of an operand: one float32, or two neighbouring bfloat16 that one instruction multiplies and sums.
Works like ``tile_product``, but consecutive words of w are ``w_stride`` bytes apart.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from engine.kernels.lanes import FLOATS, I32, I64, INTS, LANES, floats, integer, multiply_add_pairs

COLUMNS = 2 * LANES
"""Columns of a tile."""

ROWS = 12 if LANES == 16 else 6
"""Rows of a tile. With two registers of sums a row, they take three quarters of the register file."""

UNROLLED = 4
"""Words between two jumps of the loop; the number of words must be a multiple of it."""

WORD_BYTES = 4

_HALVES = range(2)


def _dot_tile(*, adds: bool) -> Any:
    """``tile(x, x_stride, w, w_stride, num_words, y, y_stride, like)``.

    y[ROWS, COLUMNS] = x[ROWS, num_words] @ w[num_words, COLUMNS], added to y with ``adds``. y is float32. All arguments
    but the last are addresses, strides in bytes, or a count. ``like`` is a number of the words' type: float32, or
    uint16 for pairs of bfloat16.
    """

    @intrinsic
    def tile(
        typing_context: Any,
        x: Any,
        x_stride: Any,
        w: Any,
        w_stride: Any,
        num_words: Any,
        y: Any,
        y_stride: Any,
        like: Any,
    ) -> Any:
        """Compute one tile."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _Tile(builder, has_pairs=like == types.uint16, adds=adds).build(*arguments[:7])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7, like), generate

    return tile


class _Tile:
    """Builds the machine code of one tile."""

    def __init__(self, builder: Any, *, has_pairs: bool, adds: bool) -> None:
        self._builder = builder
        self._has_pairs, self._adds = has_pairs, adds
        self._operand = INTS if has_pairs else FLOATS
        if has_pairs:
            self._multiply_add = multiply_add_pairs()
        else:
            kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
            self._multiply_add = get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")

    def build(self, x: Any, x_stride: Any, w: Any, w_stride: Any, num_words: Any, y: Any, y_stride: Any) -> None:
        """Emit a loop over the words that keeps the sums in registers, then the stores."""
        b = self._builder
        starts = [b.add(x, b.mul(x_stride, integer(row))) for row in range(ROWS)]
        places = [[self._place(y, y_stride, row, half) for half in _HALVES] for row in range(ROWS)]
        first = [[b.load(place, align=WORD_BYTES) if self._adds else floats(0.0) for place in row] for row in places]
        before, body, after = b.block, b.append_basic_block("words"), b.append_basic_block("stores")
        b.branch(body)
        b.position_at_end(body)
        word = b.phi(I64)
        sums = [[b.phi(FLOATS) for _ in _HALVES] for _ in range(ROWS)]
        results: list[list[Any]] = [list(row) for row in sums]
        for step in range(UNROLLED):
            self._add_word(b.add(word, integer(step)), starts, w, w_stride, results)
        following = b.add(word, integer(UNROLLED))
        word.add_incoming(integer(0), before)
        word.add_incoming(following, body)
        for row in range(ROWS):
            for half in _HALVES:
                sums[row][half].add_incoming(first[row][half], before)
                sums[row][half].add_incoming(results[row][half], body)
        b.cbranch(b.icmp_signed("<", following, num_words), body, after)
        b.position_at_end(after)
        for row in range(ROWS):
            for half in _HALVES:
                b.store(results[row][half], places[row][half], align=WORD_BYTES)

    def _add_word(self, word: Any, starts: list[Any], w: Any, w_stride: Any, results: list[list[Any]]) -> None:
        b = self._builder
        place = b.add(w, b.mul(w_stride, word))
        weights = [self._load(b.add(place, integer(half * LANES * WORD_BYTES)), self._operand) for half in _HALVES]
        offset = b.mul(word, integer(WORD_BYTES))
        unset = ir.Constant(self._operand, ir.Undefined)
        for row in range(ROWS):
            number = self._load(b.add(starts[row], offset), self._operand.element)
            lowest = b.insert_element(unset, number, ir.Constant(I32, 0))
            everywhere = b.shuffle_vector(lowest, unset, ir.Constant(INTS, [0] * LANES))
            for half in _HALVES:
                results[row][half] = self._accumulate(results[row][half], everywhere, weights[half])

    def _accumulate(self, total: Any, x: Any, w: Any) -> Any:
        arguments = [total, x, w] if self._has_pairs else [x, w, total]
        return self._builder.call(self._multiply_add, arguments)

    def _load(self, address: Any, kind: Any) -> Any:
        return self._builder.load(self._builder.inttoptr(address, kind.as_pointer()), align=WORD_BYTES)

    def _place(self, y: Any, y_stride: Any, row: int, half: int) -> Any:
        b = self._builder
        address = b.add(b.add(y, b.mul(y_stride, integer(row))), integer(half * LANES * WORD_BYTES))
        return b.inttoptr(address, FLOATS.as_pointer())


set_tile = _dot_tile(adds=False)
add_tile = _dot_tile(adds=True)
