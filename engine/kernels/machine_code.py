"""Operations that kernels need and numba lacks: half precision, addresses, prefetching, a shared counter.

bfloat16 is passed as uint16 and float16 as int16, so that ``widen`` and ``narrow`` can tell them apart by type.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.loops import emit_prefetch

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()
_BF16_SHIFT = 16
_RANKS = {
    types.float32: (types.int32, 0x7F800000),
    types.uint16: (types.int16, 0x7F80),
    types.int16: (types.int16, 0x7C00),
}
"""For each stored type: the integer type of its ranks, and the bits of infinity."""


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """Turn an integer address into a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _BYTES)

    return types.voidptr(types.int64), generate


@intrinsic
def address_of(typing_context: Any, array: Any) -> Any:
    """The address of an array's data. numpy's ``ctypes.data`` is unsigned, and numba turns its sum with a signed
    integer into a float."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        return builder.ptrtoint(data, _I64)

    return types.int64(array), generate


@intrinsic
def take_next(typing_context: Any, address: Any) -> Any:
    """Atomically read the 64-bit counter at an address and add one to it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(_I64, 1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def widen(typing_context: Any, value: Any) -> Any:
    """A stored number as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (number,) = arguments
        if value == types.uint16:
            bits = builder.shl(builder.zext(number, _I32), ir.Constant(_I32, _BF16_SHIFT))
            return builder.bitcast(bits, _F32)
        if value == types.int16:
            return builder.fpext(builder.bitcast(number, ir.HalfType()), _F32)
        return number

    return types.float32(value), generate


@intrinsic
def narrow(typing_context: Any, number: Any, like: Any) -> Any:
    """Round a float32 to the nearest stored number of the type of ``like``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = arguments[0]
        if like == types.uint16:
            bits = builder.bitcast(value, _I32)
            # Round half to even: add just under half, and one more if the last bit that stays is odd.
            odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, _BF16_SHIFT)), ir.Constant(_I32, 1))
            rounded = builder.add(builder.add(bits, ir.Constant(_I32, 0x7FFF)), odd)
            rounded_half = builder.trunc(builder.lshr(rounded, ir.Constant(_I32, _BF16_SHIFT)), ir.IntType(16))
            quiet_nan = ir.Constant(ir.IntType(16), 0x7FC0)
            return builder.select(builder.fcmp_unordered("uno", value, value), quiet_nan, rounded_half)
        if like == types.int16:
            return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))
        return value

    return like(types.float32, like), generate


@intrinsic
def float_from_bits(typing_context: Any, bits: Any) -> Any:
    """The float32 whose bits are those of an int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _F32)

    return types.float32(types.int32), generate


def ranks_type(stored: Any) -> Any:
    """The integer type of the ranks of a stored type."""
    return _RANKS[stored][0]


def ranks_of(builder: Any, numbers: Any, stored: Any) -> Any:
    """Emit the rank of a number that is stored as ``stored``, or of each number of a vector; see ``rank``."""
    kind, infinity = _RANKS[stored]
    width = ir.IntType(kind.bitwidth)
    is_vector = isinstance(numbers.type, ir.VectorType)
    whole = ir.VectorType(width, numbers.type.count) if is_vector else width

    def constant(value: int) -> Any:
        return ir.Constant(whole, [value] * whole.count if is_vector else value)

    bits, nan_rank = builder.bitcast(numbers, whole), constant(kind.maxval)
    magnitude = builder.and_(bits, nan_rank)
    is_negative = builder.icmp_signed("<", bits, constant(0))
    ordered = builder.select(is_negative, builder.sub(constant(0), magnitude), magnitude)
    is_nan = builder.icmp_signed(">", magnitude, constant(infinity))
    return builder.select(is_nan, nan_rank, ordered)


@intrinsic
def rank(typing_context: Any, stored: Any) -> Any:
    """A stored number as an integer of its width with the same order: both zeros are 0, and NaN is the largest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ranks_of(builder, arguments[0], stored)

    return ranks_type(stored)(stored), generate


@intrinsic
def raise_to(typing_context: Any, address: Any, number: Any) -> Any:
    """Atomically replace the int64 at an address by ``number`` if that is greater."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _I64.as_pointer())
        builder.atomic_rmw("max", place, arguments[1], "monotonic")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _prefetch(closeness: int) -> Any:
    """``prefetch(address)`` into the L1 cache (closeness 3) or the L2 cache (2)."""

    @intrinsic
    def prefetch(typing_context: Any, address: Any) -> Any:
        """Prefetch the cache line at an address; harmless for any address."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit_prefetch(builder, arguments[0], closeness)
            return context.get_dummy_value()

        return types.void(types.int64), generate

    return prefetch


prefetch = _prefetch(3)
prefetch_to_second = _prefetch(2)
"""A prefetch into L1 takes one of few slots for lines in flight, and the core stalls if none is free. L2 has more."""


@intrinsic
def add_to(typing_context: Any, address: Any) -> Any:
    """Add one to the 64-bit counter at an address (release): publishes all earlier writes of this thread."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], _I64.as_pointer())
        builder.atomic_rmw("add", counter, ir.Constant(_I64, 1), "acq_rel")
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def look_at(typing_context: Any, address: Any) -> Any:
    """Read the 64-bit counter at an address (acquire): sees all writes before each counted ``add_to``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.load_atomic(counter, "acquire", 8)

    return types.int64(types.int64), generate
