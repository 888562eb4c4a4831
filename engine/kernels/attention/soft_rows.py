"""The running softmax of a tile of scores, several rows side by side, as machine code.

One row alone would wait most of the time: for its maximum, for each exponential, for its sum. ``SIDE`` rows have
nothing to wait for. Addresses, strides in bytes and counts are int64; scores, maxima and sums are float32.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from engine.kernels.lanes import F32, FLOAT_BYTES, LANES, Lanes, floats, integer

SIDE = 4 if LANES == 16 else 2
"""Rows side by side; a tile has a multiple of it. More would not fit the registers."""


@intrinsic
def raise_peaks(typing_context: Any, scores: Any, stride: Any, count: Any, peaks: Any) -> Any:
    """peaks[SIDE] = the largest of each row's ``count`` scores, where it is larger; NaN is ignored."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, stride, count, peaks = arguments
        lanes, b = Lanes(builder), builder
        rows = [b.add(scores, b.mul(stride, integer(row))) for row in range(SIDE)]

        def step(offset: Any, highest: list[Any]) -> list[Any]:
            pairs = zip(rows, highest, strict=True)
            return [lanes.larger(lanes.load(row, offset, types.float32), so_far) for row, so_far in pairs]

        places = [_place(b, peaks, row) for row in range(SIDE)]
        highest = lanes.fold_all(count, [lanes.spread(b.load(place)) for place in places], step)
        for place, vector in zip(places, highest, strict=True):
            b.store(lanes.reduce(vector, lanes.larger), place)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def soften_rows(
    typing_context: Any,
    scores: Any,
    stride: Any,
    weights: Any,
    weights_stride: Any,
    count: Any,
    peaks: Any,
    scale: Any,
    sums: Any,
    like: Any,
) -> Any:
    """weights = exp((scores - the row's peak) * scale); sums[SIDE] = each row's weights added up before rounding.

    ``like`` has the type of the weights.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, stride, weights, weights_stride, count, peaks, scale, sums, _ = arguments
        lanes, b = Lanes(builder), builder
        factor = lanes.spread(scale)
        rows = range(SIDE)
        sources = [b.add(scores, b.mul(stride, integer(row))) for row in rows]
        targets = [b.add(weights, b.mul(weights_stride, integer(row))) for row in rows]
        shifts = [lanes.spread(b.load(_place(b, peaks, row))) for row in rows]

        def step(offset: Any, totals: list[Any]) -> list[Any]:
            distances = [
                b.fsub(lanes.load(source, offset, types.float32), shift)
                for source, shift in zip(sources, shifts, strict=True)
            ]
            results = [lanes.exponential(b.fmul(distance, factor)) for distance in distances]
            for result, target in zip(results, targets, strict=True):
                lanes.store(result, target, offset, like)
            return [b.fadd(total, result) for total, result in zip(totals, results, strict=True)]

        totals = lanes.fold_all(count, [floats(0.0)] * SIDE, step)
        for row, total in enumerate(totals):
            b.store(lanes.reduce(total, b.fadd), _place(b, sums, row))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, types.float32, types.int64, like), generate


@intrinsic
def decay(typing_context: Any, before: Any, peaks: Any, scale: Any, factors: Any) -> Any:
    """factors[LANES] = exp((before - peaks) * scale): what weights relative to maxima before are worth now."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        before, peaks, scale, factors = arguments
        lanes, none = Lanes(builder), integer(0)
        distance = builder.fsub(*(lanes.load(numbers, none, types.float32) for numbers in (before, peaks)))
        result = lanes.exponential(builder.fmul(distance, lanes.spread(scale)))
        lanes.store(result, factors, none, types.float32)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate


def _place(b: Any, numbers: Any, index: int) -> Any:
    return b.inttoptr(b.add(numbers, integer(index * FLOAT_BYTES)), F32.as_pointer())
