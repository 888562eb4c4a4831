"""The innermost loop of a matrix product: a few rows of the input times one panel of the weight, as machine code.

A word is what the input and the weight are multiplied in: one number, or two neighbouring bfloat16 of both that one
instruction multiplies and adds up. Written out for LLVM, since no loop that numba compiles keeps all sums in registers.
After Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from engine.kernels.compiled import PART_OPTIONS
from engine.kernels.lanes import LANES, multiply_add_pairs

PANEL = 2 * LANES
"""Columns of the output that a panel makes: two registers."""

MAX_ROWS = 12 if LANES == 16 else 6
"""Rows whose sums are in registers together, beside two of the weight and one of the input: 24 of 32, or 12 of 16."""

UNROLLED = 4
"""Words of the input between two jumps; their number must be a multiple of it."""

WORD_BYTES = 4
"""Of a word of the input."""

PAIR = types.uint32
"""What tells that words are pairs of bfloat16."""

_PREFETCH_WORDS = 32
_LINE_BYTES = 64
_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()
_BF16_SHIFT = 16


def tile_product(num_rows: int) -> Any:
    """``tile(x, x_stride, panel, num_words, start, start_stride, y, y_stride, like)`` for so many rows.

    All but the last one are addresses, strides in bytes and a count. The output y, and what its sums ``start`` with are
    float32: a stride of 0 is a bias for all rows. ``like`` is of the weight's type: float32, uint16 for bfloat16, int16
    for float16, each with an input x in float32; or ``PAIR``, with both in pairs of bfloat16.
    """

    @intrinsic
    def tile(
        typing_context: Any,
        x: Any,
        x_stride: Any,
        panel: Any,
        num_words: Any,
        start: Any,
        start_stride: Any,
        y: Any,
        y_stride: Any,
        like: Any,
    ) -> Any:
        """One tile."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            tile = _Tile(builder, num_rows, like)
            tile.build(*arguments[:8])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8, like), generate

    return tile


class _Tile:
    """Builds the machine code of one tile."""

    def __init__(self, builder: Any, num_rows: int, weight: Any) -> None:
        self._builder = builder
        self._floats, self._shorts, self._ints = (ir.VectorType(kind, LANES) for kind in (_F32, _I16, _I32))
        self._rows = range(num_rows)
        self._weight = weight
        self._operand = self._ints if weight == PAIR else self._floats
        if weight == PAIR:
            self._multiply_add = multiply_add_pairs()
        else:
            kind = ir.FunctionType(self._floats, [self._floats] * 3)
            self._multiply_add = get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")

    def build(
        self, x: Any, x_stride: Any, panel: Any, num_words: Any, start: Any, start_stride: Any, y: Any, y_stride: Any
    ) -> None:
        """A loop over the input's words that keeps the sums in registers, then the stores."""
        b = self._builder
        starts = [b.add(x, b.mul(x_stride, _int(row))) for row in self._rows]
        places = [b.add(start, b.mul(start_stride, _int(row))) for row in self._rows]
        first = [[self._load(place, half, types.float32) for half in range(2)] for place in places]
        before, body, after = b.block, b.append_basic_block("words"), b.append_basic_block("stores")
        b.branch(body)
        b.position_at_end(body)
        word = b.phi(_I64)
        sums = [[b.phi(self._floats) for _ in range(2)] for _ in self._rows]
        results = [list(row) for row in sums]
        for step in range(UNROLLED):
            self._add_word(b.add(word, _int(step)), starts, panel, results)
        following = b.add(word, _int(UNROLLED))
        word.add_incoming(_int(0), before)
        word.add_incoming(following, body)
        for row in self._rows:
            for half in range(2):
                sums[row][half].add_incoming(first[row][half], before)
                sums[row][half].add_incoming(results[row][half], body)
        b.cbranch(b.icmp_signed("<", following, num_words), body, after)
        b.position_at_end(after)
        for row in self._rows:
            for half in range(2):
                self._store(results[row][half], b.add(y, b.mul(y_stride, _int(row))), half)

    def _add_word(self, word: Any, starts: list[Any], panel: Any, results: list[list[Any]]) -> None:
        """Add one word of the input, times a panel's words."""
        b = self._builder
        num_bytes = PANEL * _num_bytes(self._weight)
        place = b.add(panel, b.mul(word, _int(num_bytes)))
        for line in range(0, num_bytes, _LINE_BYTES):
            self._prefetch(b.add(place, _int(_PREFETCH_WORDS * num_bytes + line)))
        weights = [self._load(place, half, self._weight) for half in range(2)]
        offset = b.mul(word, _int(WORD_BYTES))
        unset = ir.Constant(self._operand, ir.Undefined)
        for row in self._rows:
            address = b.inttoptr(b.add(starts[row], offset), self._operand.element.as_pointer())
            lowest = b.insert_element(unset, b.load(address, align=_num_bytes(types.uint16)), ir.Constant(_I32, 0))
            everywhere = b.shuffle_vector(lowest, unset, self._all(0))
            for half in range(2):
                results[row][half] = self._accumulate(results[row][half], everywhere, weights[half])

    def _accumulate(self, total: Any, x: Any, weight: Any) -> Any:
        arguments = [total, x, weight] if self._weight == PAIR else [x, weight, total]
        return self._builder.call(self._multiply_add, arguments)

    def _load(self, address: Any, half: int, like: Any) -> Any:
        """A register's stored numbers as float32, or its pairs as they are."""
        b = self._builder
        stored = self._stored(like)
        place = b.add(address, _int(half * LANES * _num_bytes(like)))
        numbers = b.load(b.inttoptr(place, stored.as_pointer()), align=_num_bytes(like))
        if like == types.uint16:
            return b.bitcast(b.shl(b.zext(numbers, self._ints), self._all(_BF16_SHIFT)), self._floats)
        return b.fpext(numbers, self._floats) if like == types.int16 else numbers

    def _store(self, numbers: Any, address: Any, half: int) -> None:
        b = self._builder
        place = b.add(address, _int(half * LANES * _num_bytes(types.float32)))
        b.store(numbers, b.inttoptr(place, self._floats.as_pointer()), align=_num_bytes(types.float32))

    def _prefetch(self, address: Any) -> None:
        b = self._builder
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
        function = b.module.declare_intrinsic("llvm.prefetch", [_BYTES], kind)
        for_reading, keep_close, is_data = (ir.Constant(_I32, value) for value in (0, 3, 1))
        b.call(function, [b.inttoptr(address, _BYTES), for_reading, keep_close, is_data])

    def _stored(self, like: Any) -> Any:
        """A register's numbers as they lie in memory."""
        if like == types.int16:
            return ir.VectorType(ir.HalfType(), LANES)
        if like == types.uint16:
            return self._shorts
        return self._ints if like == PAIR else self._floats

    def _all(self, value: int) -> Any:
        return ir.Constant(self._ints, [value] * LANES)


def _num_bytes(like: Any) -> int:
    return 4 if like in (types.float32, PAIR) else 2


def _int(value: int) -> Any:
    return ir.Constant(_I64, value)


def any_tile() -> Any:
    """``tile(height, x, x_stride, panel, num_words, start, start_stride, y, y_stride, like)``: 1 to ``MAX_ROWS`` rows;
    see ``tile_product``.
    """
    first = tile_product(1)

    @njit(**PART_OPTIONS)  # type: ignore[untyped-decorator]
    def tile(height, x, x_stride, panel, num_words, start, start_stride, y, y_stride, like):  # type: ignore[no-untyped-def]
        first(x, x_stride, panel, num_words, start, start_stride, y, y_stride, like)

    for height in range(2, MAX_ROWS + 1):
        tile = _or_lower(height, tile_product(height), tile)
    return tile


def _or_lower(own_height: int, own: Any, lower: Any) -> Any:
    """A tile of one height more than ``lower`` knows."""

    @njit(**PART_OPTIONS)  # type: ignore[untyped-decorator]
    def tile(height, x, x_stride, panel, num_words, start, start_stride, y, y_stride, like):  # type: ignore[no-untyped-def]
        if height == own_height:
            own(x, x_stride, panel, num_words, start, start_stride, y, y_stride, like)
        else:
            lower(height, x, x_stride, panel, num_words, start, start_stride, y, y_stride, like)

    return tile
