"""Loops over vector registers, built for LLVM. Compilers turn such loops into scalar code when types are mixed.

All loops take ``LANES`` numbers at a time; callers handle the rest of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import types

_FEATURES = binding.get_host_cpu_features()
_HAS_AVX512 = _FEATURES.get("avx512f", False)

LANES = 16 if _HAS_AVX512 else 8
"""float32 numbers in a vector register."""

HAS_BFLOAT16_UNIT = bool(_HAS_AVX512 and _FEATURES.get("avx512bf16", False))
"""True if the CPU has instructions that multiply pairs of bfloat16 and that round to bfloat16."""

if HAS_BFLOAT16_UNIT:  # LLVM's names for them take a type that llvmlite cannot express
    binding.initialize_native_asmparser()

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
FLOAT_BYTES = 4

_SHORTS, _HALVES = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(ir.HalfType(), LANES)
_BF16_SHIFT = 16
_LOWEST_EXPONENT = -87.0
_EXPONENT_BIAS, _MANTISSA_BITS = 127, 23
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)

Step = Callable[[Any, Any], Any]


class Lanes:
    """Emits operations on vectors at the builder's place in a function."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def fold(self, count: Any, first: Any, step: Step) -> Any:
        """``state = step(offset, state)`` for offsets 0, LANES, ... below ``count``; at least once."""
        return self.fold_all(count, [first], lambda offset, states: [step(offset, states[0])])[0]

    def fold_all(
        self, count: Any, firsts: list[Any], step: Callable[[Any, list[Any]], list[Any]], *, stride: int = LANES
    ) -> list[Any]:
        """Like ``fold`` for several states at once, with offsets ``stride`` apart."""
        b = self.builder
        before, body, after = b.block, b.append_basic_block("lanes"), b.append_basic_block("folded")
        b.branch(body)
        b.position_at_end(body)
        offset, states = b.phi(I64), [b.phi(first.type) for first in firsts]
        results = step(offset, list(states))
        following = b.add(offset, integer(stride))
        offset.add_incoming(integer(0), before)
        offset.add_incoming(following, body)
        for state, first, result in zip(states, firsts, results, strict=True):
            state.add_incoming(first, before)
            state.add_incoming(result, body)
        b.cbranch(b.icmp_signed("<", following, count), body, after)
        b.position_at_end(after)
        return results

    def reduce(self, lanes: Any, join: Callable[[Any, Any], Any]) -> Any:
        """Combine all lanes into one number, halving the vector each time."""
        b, width = self.builder, LANES
        while width > 1:
            width //= 2
            order = [(lane + width) % LANES for lane in range(LANES)]
            lanes = join(lanes, b.shuffle_vector(lanes, lanes, ir.Constant(INTS, order)))
        return b.extract_element(lanes, ir.Constant(I32, 0))

    def load(self, address: Any, offset: Any, like: Any) -> Any:
        """Load stored numbers of the type of ``like`` as float32; see ``machine_code`` for the types."""
        b, kind = self.builder, _stored(like)
        numbers = b.load(self._place(address, offset, like), align=num_bytes(like))
        if like == types.uint16:
            return b.bitcast(b.shl(b.zext(numbers, INTS), ir.Constant(INTS, [_BF16_SHIFT] * LANES)), FLOATS)
        return b.fpext(numbers, FLOATS) if kind is _HALVES else numbers

    def store(self, numbers: Any, address: Any, offset: Any, like: Any) -> None:
        """Round float32 to the nearest stored numbers of the type of ``like``, and store them."""
        b = self.builder
        if like == types.uint16:
            numbers = self._to_bfloat16(numbers)
        elif like == types.int16:
            numbers = b.fptrunc(numbers, _HALVES)
        place = self._place(address, offset, like)
        b.store(numbers, b.bitcast(place, numbers.type.as_pointer()), align=num_bytes(like))

    def spread(self, number: Any) -> Any:
        """The number in all lanes."""
        b, unset = self.builder, ir.Constant(FLOATS, ir.Undefined)
        lowest = b.insert_element(unset, number, ir.Constant(I32, 0))
        return b.shuffle_vector(lowest, unset, ir.Constant(INTS, [0] * LANES))

    def multiply_add(self, x: Any, y: Any, z: Any) -> Any:
        """x * y + z, rounded once."""
        return self._call("fma", x, y, z)

    def magnitude(self, x: Any) -> Any:
        """The absolute value."""
        return self._call("fabs", x)

    def larger(self, x: Any, y: Any) -> Any:
        """x where it is greater, else y: a NaN in x is ignored."""
        b = self.builder
        return b.select(b.fcmp_ordered(">", x, y), x, y)

    def exponential(self, x: Any) -> Any:
        """e to the x for x <= 0, by the polynomial of ``compiled.exp``; results below e^-87 are 0."""
        b = self.builder
        lowest = floats(_LOWEST_EXPONENT)
        is_tiny = b.fcmp_ordered("<", x, lowest)
        x = b.select(is_tiny, lowest, x)
        whole = self._call("floor", self.multiply_add(x, floats(1.4426950408889634), floats(0.5)))
        rest = self.multiply_add(whole, floats(-0.693145751953125), x)
        rest = self.multiply_add(whole, floats(-1.428606765330187e-06), rest)
        result = floats(_POLYNOMIAL[0])
        for coefficient in _POLYNOMIAL[1:]:
            result = self.multiply_add(result, rest, floats(coefficient))
        result = self.multiply_add(b.fmul(result, rest), rest, b.fadd(rest, floats(1.0)))
        exponent = b.add(b.fptosi(whole, INTS), ir.Constant(INTS, [_EXPONENT_BIAS] * LANES))
        power = b.bitcast(b.shl(exponent, ir.Constant(INTS, [_MANTISSA_BITS] * LANES)), FLOATS)
        return b.select(is_tiny, floats(0.0), b.fmul(result, power))

    def _to_bfloat16(self, numbers: Any) -> Any:
        b = self.builder
        if HAS_BFLOAT16_UNIT:
            kind = ir.FunctionType(ir.VectorType(I32, LANES // 2), [FLOATS])
            return b.call(ir.InlineAsm(kind, "vcvtneps2bf16 $1, $0", "=v,v"), [numbers])
        bits = b.bitcast(numbers, INTS)
        shift, one, under_half, none = (ir.Constant(INTS, [x] * LANES) for x in (_BF16_SHIFT, 1, 0x7FFF, 0x7FC0))
        # Half to even: add just under half, and one more if the last bit that stays is odd.
        rounded = b.lshr(b.add(b.add(bits, under_half), b.and_(b.lshr(bits, shift), one)), shift)
        is_nan = b.fcmp_unordered("uno", numbers, numbers)
        return b.trunc(b.select(is_nan, none, rounded), _SHORTS)

    def _place(self, address: Any, offset: Any, like: Any) -> Any:
        b = self.builder
        return b.inttoptr(b.add(address, b.mul(offset, integer(num_bytes(like)))), _stored(like).as_pointer())

    def _call(self, name: str, *arguments: Any) -> Any:
        kind = ir.FunctionType(FLOATS, [FLOATS] * len(arguments))
        function = self.builder.module.declare_intrinsic(f"llvm.{name}.v{LANES}f32", (), kind)
        return self.builder.call(function, arguments)


def floats(value: float) -> Any:
    """A float constant in all lanes."""
    return ir.Constant(FLOATS, [value] * LANES)


def multiply_add_pairs() -> Any:
    """The intrinsic total + x * w in float32, for INTS that each hold a pair of neighbouring bfloat16. Needs
    ``HAS_BFLOAT16_UNIT``.

    LLVM's own name for it takes a type that llvmlite cannot express.
    """
    return ir.InlineAsm(ir.FunctionType(FLOATS, [FLOATS, INTS, INTS]), "vdpbf16ps $3, $2, $0", "=v,0,v,v")


def integer(value: int) -> Any:
    """An integer constant: address, offset or count."""
    return ir.Constant(I64, value)


def num_bytes(like: Any) -> int:
    """Bytes of a stored number of a type."""
    return 2 if like in (types.uint16, types.int16) else FLOAT_BYTES


def _stored(like: Any) -> Any:
    if like == types.int16:
        return _HALVES
    return _SHORTS if like == types.uint16 else FLOATS
