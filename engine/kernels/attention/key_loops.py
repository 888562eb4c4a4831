"""The loops of attention over scattered cache rows, for a few query heads at a time, as machine code.

Each row is read in place, once for all these heads, and sums stay in registers. Addresses and counts are int64, the
size of a row is a multiple of ``LANES``, and ``like`` is a number of the rows' type. See also ``lanes``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.kernels.compiled import PART_OPTIONS
from engine.kernels.lanes import FLOAT_BYTES, I32, I64, LANES, Lanes, floats, integer

KEYS = 8 if LANES == 16 else 4
"""Keys whose scores are summed side by side. With three heads they fill most of the register file."""

VECTORS = 4
"""Registers of a value that are summed side by side."""

ADDRESS_BYTES = 8


def _score_keys(num_heads: int) -> Any:
    """``score(queries, stride, addresses, num_numbers, scores, scores_stride, like)``.

    scores[num_heads, KEYS] = the dot products of queries, [num_heads, num_numbers] float32, with the rows at
    ``KEYS`` addresses.
    """

    @intrinsic
    def score(
        typing_context: Any,
        queries: Any,
        stride: Any,
        addresses: Any,
        num_numbers: Any,
        scores: Any,
        scores_stride: Any,
        like: Any,
    ) -> Any:
        """Score one group of keys."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            queries, stride, addresses, num_numbers, scores, scores_stride, _ = arguments
            b, lanes = builder, Lanes(builder)
            heads = [b.add(queries, b.mul(stride, integer(head))) for head in range(num_heads)]
            rows = [_load(b, b.add(addresses, integer(key * ADDRESS_BYTES)), I64) for key in range(KEYS)]

            def step(offset: Any, sums: list[Any]) -> list[Any]:
                numbers = [lanes.load(head, offset, types.float32) for head in heads]
                results = []
                for key, row in enumerate(rows):
                    loaded, totals = lanes.load(row, offset, like), sums[key * num_heads : (key + 1) * num_heads]
                    pairs = zip(numbers, totals, strict=True)
                    results += [lanes.multiply_add(number, loaded, total) for number, total in pairs]
                return results

            sums = lanes.fold_all(num_numbers, [floats(0.0)] * (KEYS * num_heads), step)
            for head in range(num_heads):
                place = b.add(scores, b.mul(scores_stride, integer(head)))
                total = _add_up(b, sums[head::num_heads])
                b.store(total, b.inttoptr(place, total.type.as_pointer()), align=FLOAT_BYTES)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6, like), generate

    return score


def _add_up(b: Any, sums: list[Any]) -> Any:
    """A vector with the sums over the lanes of ``KEYS`` registers.

    Each round merges pairs of registers into one that holds half as many partial sums of each, until one register is
    left.
    """
    while len(sums) > 1:
        count = KEYS // len(sums)  # whose partial sums a register holds
        size = LANES // count
        low = [part * size + lane for part in range(2 * count) for lane in range(size // 2)]
        high = [lane + size // 2 for lane in low]
        pairs = zip(sums[::2], sums[1::2], strict=True)
        sums = [b.fadd(_choose(b, one, other, low), _choose(b, one, other, high)) for one, other in pairs]
    size = LANES // KEYS
    total = sums[0]
    while size > 1:
        count, size = KEYS, size // 2
        low = [part * 2 * size + lane for part in range(count) for lane in range(size)]
        total = b.fadd(_choose(b, total, total, low), _choose(b, total, total, [lane + size for lane in low]))
    return total


def _choose(b: Any, one: Any, other: Any, order: list[int]) -> Any:
    return b.shuffle_vector(one, other, ir.Constant(ir.VectorType(I32, len(order)), order))


def _add_values(num_heads: int, num_vectors: int) -> Any:
    """``add(weights, weights_stride, addresses, count, first, sums, sums_stride, like)``.

    Add the rows at ``count`` addresses to sums[num_heads, num_vectors * LANES], float32, each row times its weight in
    weights[num_heads, count], float32. Of sums and rows it takes the numbers from the ``first`` on.
    """

    @intrinsic
    def add(
        typing_context: Any,
        weights: Any,
        weights_stride: Any,
        addresses: Any,
        count: Any,
        first: Any,
        sums: Any,
        sums_stride: Any,
        like: Any,
    ) -> Any:
        """Add some numbers of all rows."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights, weights_stride, addresses, count, first, sums, sums_stride, _ = arguments
            b, lanes = builder, Lanes(builder)
            offsets = [b.add(first, integer(vector * LANES)) for vector in range(num_vectors)]
            heads = [b.add(weights, b.mul(weights_stride, integer(head))) for head in range(num_heads)]
            targets = [b.add(sums, b.mul(sums_stride, integer(head))) for head in range(num_heads)]
            places = [(target, offset) for target in targets for offset in offsets]

            def step(index: Any, totals: list[Any]) -> list[Any]:
                row = _load(b, b.add(addresses, b.mul(index, integer(ADDRESS_BYTES))), I64)
                values = [lanes.load(row, offset, like) for offset in offsets]
                results = []
                for head, weights_of_head in enumerate(heads):
                    place = b.add(weights_of_head, b.mul(index, integer(FLOAT_BYTES)))
                    weight = lanes.spread(_load(b, place, ir.FloatType()))
                    totals_of_head = totals[head * num_vectors : (head + 1) * num_vectors]
                    results += [lanes.multiply_add(weight, *pair) for pair in zip(values, totals_of_head, strict=True)]
                return results

            before = [lanes.load(*place, types.float32) for place in places]
            for place, total in zip(places, lanes.fold_all(count, before, step, stride=1), strict=True):
                lanes.store(total, *place, types.float32)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7, like), generate

    return add


def _load(b: Any, address: Any, kind: Any) -> Any:
    return b.load(b.inttoptr(address, kind.as_pointer()), align=FLOAT_BYTES)


def _by_heads(build: Callable[[int], Any]) -> Any:
    """``call(num_heads, ...)``: dispatches to the loop that ``build`` makes for one, two or three heads."""
    for_one, for_two, for_three = (build(number) for number in (1, 2, 3))

    @njit(**PART_OPTIONS)  # type: ignore[misc]
    def call(num_heads, *arguments):  # type: ignore[no-untyped-def]
        if num_heads == 3:
            for_three(*arguments)
        elif num_heads == 2:
            for_two(*arguments)
        else:
            for_one(*arguments)

    return call


score_keys = _by_heads(_score_keys)
add_values = _by_heads(partial(_add_values, num_vectors=VECTORS))
add_register = _by_heads(partial(_add_values, num_vectors=1))
"""``add_values`` for values, or remainders of values, whose size is not a multiple of ``VECTORS`` registers."""
