"""Loops over addresses and prefetches, built for LLVM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from engine.kernels.lanes import I32

_BYTES = ir.IntType(8).as_pointer()


def walk(b: Any, walks: list[tuple[Any, Any]], end: Any, body: Callable[..., None]) -> None:
    """``body(*places)`` at least once, for places that start and move on as ``walks`` say, (start, step), until the
    first one reaches ``end``. ``b`` is the builder.
    """
    before, inside, after = b.block, b.append_basic_block("walk"), b.append_basic_block("walked")
    b.branch(inside)
    b.position_at_end(inside)
    places = [b.phi(start.type) for start, _ in walks]
    body(*places)
    following = [b.add(place, step) for place, (_, step) in zip(places, walks, strict=True)]
    for place, (start, _), later in zip(places, walks, following, strict=True):
        place.add_incoming(start, before)
        place.add_incoming(later, b.block)
    b.cbranch(b.icmp_unsigned("<", following[0], end), inside, after)
    b.position_at_end(after)


def emit_prefetch(b: Any, address: Any, closeness: int) -> None:
    """Prefetch the cache line at an address into the L1 cache (closeness 3) or the L2 cache (2); harmless for any
    address.
    """
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, I32, I32, I32])
    function = b.module.declare_intrinsic("llvm.prefetch", [_BYTES], kind)
    for_reading, keep_close, is_data = (ir.Constant(I32, value) for value in (0, closeness, 1))
    b.call(function, [b.inttoptr(address, _BYTES), for_reading, keep_close, is_data])
