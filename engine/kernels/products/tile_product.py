"""The innermost loop of a matrix product: a few rows of the input times one panel of the weight, as machine code.

A word is the unit of multiplication: one number, or two neighbouring bfloat16 that one instruction multiplies and sums.
The code is emitted for LLVM directly, since no loop that numba compiles keeps all sums in registers.
After Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from engine.kernels.lanes import LANES, multiply_add_pairs
from engine.kernels.loops import emit_prefetch

PANEL = 2 * LANES
"""Columns of the output that a panel yields: two registers."""

MAX_ROWS = 12 if LANES == 16 else 6
"""Rows whose sums fit the registers, beside two of the weight and one of the input: 24 of 32, or 12 of 16."""

UNROLLED = 4
"""Words of the input between two jumps; the number of words must be a multiple of it."""

WORD_BYTES = 4
"""Bytes of a word of the input."""

GROUP = 4
"""Rows that one address register reaches, by one, two or three times the stride."""

PAIR = types.uint32
"""The type that marks words as pairs of bfloat16."""

_PREFETCH_WORDS = 32
_LINE_BYTES = 64
_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()
_BF16_SHIFT = 16


@intrinsic
def multiply_tile(
    typing_context: Any,
    height: Any,
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
    """Multiply ``height`` rows of the input, 1 to ``MAX_ROWS``; each height has its own loop.

    The arguments between the first and the last are addresses, strides in bytes and a count. The output y is float32,
    and so is ``start``, the initial value of its sums; with a stride of 0 it is a bias for all rows. ``like`` has the
    weight's type: float32, uint16 for bfloat16, int16 for float16, each with x in float32; or ``PAIR``, with x and the
    panel in pairs of bfloat16.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        chosen, *places = arguments[:9]
        after = builder.append_basic_block("after")
        switch = builder.switch(chosen, after)
        for num_rows in range(1, MAX_ROWS + 1):
            block = builder.append_basic_block(f"rows{num_rows}")
            switch.add_case(_int(num_rows), block)
            builder.position_at_end(block)
            _Tile(builder, num_rows, like).build(*places)
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9, like), generate


class _Tile:
    """Builds the machine code of one tile."""

    def __init__(self, builder: Any, num_rows: int, weight: Any) -> None:
        self._builder = builder
        self._floats, self._shorts, self._ints = (ir.VectorType(kind, LANES) for kind in (_F32, _I16, _I32))
        self._rows = range(num_rows)
        self._weight = weight
        self._panel_bytes = PANEL * _num_bytes(weight)
        self._operand = self._ints if weight == PAIR else self._floats
        if weight == PAIR:
            self._multiply_add = multiply_add_pairs()
        else:
            kind = ir.FunctionType(self._floats, [self._floats] * 3)
            self._multiply_add = get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")

    def build(
        self, x: Any, x_stride: Any, panel: Any, num_words: Any, start: Any, start_stride: Any, y: Any, y_stride: Any
    ) -> None:
        """Emit a loop over the input's words that keeps the sums in registers, then the stores."""
        b = self._builder
        places = [b.add(start, b.mul(start_stride, _int(row))) for row in self._rows]
        first = [[self._load(place, half, types.float32) for half in range(2)] for place in places]
        groups = [self._hide(b.add(x, b.mul(x_stride, _int(row)))) for row in self._rows[::GROUP]]
        one, three = self._hide(x_stride), self._hide(b.mul(x_stride, _int(3)))
        steps = [_int(0), one, b.mul(one, _int(2)), three]
        before, body, after = b.block, b.append_basic_block("words"), b.append_basic_block("stores")
        b.branch(body)
        b.position_at_end(body)
        word, *addresses = [b.phi(_I64) for _ in range(2 + len(groups))]
        sums = [[b.phi(self._floats) for _ in range(2)] for _ in self._rows]
        results = [list(row) for row in sums]
        *at, panel_at = addresses
        for step in range(UNROLLED):
            offset = _int(step * WORD_BYTES)
            words = [b.add(b.add(at[row // GROUP], steps[row % GROUP]), offset) for row in self._rows]
            self._add_word(words, b.add(panel_at, _int(step * self._panel_bytes)), results)
        following = b.add(word, _int(UNROLLED))
        word.add_incoming(_int(0), before)
        word.add_incoming(following, body)
        widths = [WORD_BYTES] * len(groups) + [self._panel_bytes]
        for address, begin, num_bytes in zip(addresses, [*groups, panel], widths, strict=True):
            address.add_incoming(begin, before)
            address.add_incoming(b.add(address, _int(UNROLLED * num_bytes)), body)
        for row in self._rows:
            for half in range(2):
                sums[row][half].add_incoming(first[row][half], before)
                sums[row][half].add_incoming(results[row][half], body)
        b.cbranch(b.icmp_signed("<", following, num_words), body, after)
        b.position_at_end(after)
        for row in self._rows:
            for half in range(2):
                self._store(results[row][half], b.add(y, b.mul(y_stride, _int(row))), half)

    def _add_word(self, words: list[Any], panel: Any, results: list[list[Any]]) -> None:
        """Add each row's input word times the panel's words to its sums."""
        b = self._builder
        for line in range(0, self._panel_bytes, _LINE_BYTES):
            emit_prefetch(b, b.add(panel, _int(_PREFETCH_WORDS * self._panel_bytes + line)), 3)
        weights = [self._load(panel, half, self._weight) for half in range(2)]
        unset = ir.Constant(self._operand, ir.Undefined)
        for row, word in zip(self._rows, words, strict=True):
            address = b.inttoptr(word, self._operand.element.as_pointer())
            lowest = b.insert_element(unset, b.load(address, align=_num_bytes(types.uint16)), ir.Constant(_I32, 0))
            everywhere = b.shuffle_vector(lowest, unset, self._all(0))
            for half in range(2):
                results[row][half] = self._accumulate(results[row][half], everywhere, weights[half])

    def _hide(self, number: Any) -> Any:
        """The same number, with its origin hidden from LLVM. Otherwise LLVM derives each row's address from the one
        before, and every load waits for that."""
        kind = ir.FunctionType(_I64, [_I64])
        return self._builder.asm(kind, "", "=r,0", [number], False)

    def _accumulate(self, total: Any, x: Any, weight: Any) -> Any:
        arguments = [total, x, weight] if self._weight == PAIR else [x, weight, total]
        return self._builder.call(self._multiply_add, arguments)

    def _load(self, address: Any, half: int, like: Any) -> Any:
        """Load a register: stored numbers as float32, pairs as they are."""
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

    def _stored(self, like: Any) -> Any:
        """The type of a register's numbers in memory."""
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
