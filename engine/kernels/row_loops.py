"""Loops over one row for the kernels between matrix products, as machine code; see ``lanes``.

Addresses and counts are int64; a count is a positive multiple of ``LANES``. ``like`` is a number of the type stored at
the addresses before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from engine.kernels.lanes import Lanes, floats


@intrinsic
def highest_score(typing_context: Any, scores: Any, count: Any, least: Any) -> Any:
    """The largest of ``count`` float32 numbers, or ``least`` if none is greater; NaN is ignored."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, count, start = arguments
        lanes = Lanes(builder)

        def step(offset: Any, highest: Any) -> Any:
            return lanes.larger(lanes.load(address, offset, types.float32), highest)

        return lanes.reduce(lanes.fold(count, lanes.spread(start), step), lanes.larger)

    return types.float32(types.int64, types.int64, types.float32), generate


@intrinsic
def soften_row(typing_context: Any, scores: Any, weights: Any, count: Any, highest: Any, scale: Any, like: Any) -> Any:
    """weights = exp((scores - highest) * scale), of float32 scores; returns the sum of the weights before rounding."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target, count, shift, factor, _ = arguments
        lanes = Lanes(builder)
        shift, factor = lanes.spread(shift), lanes.spread(factor)

        def step(offset: Any, total: Any) -> Any:
            distance = builder.fsub(lanes.load(source, offset, types.float32), shift)
            weight = lanes.exponential(builder.fmul(distance, factor))
            lanes.store(weight, target, offset, like)
            return builder.fadd(total, weight)

        return lanes.reduce(lanes.fold(count, floats(0.0), step), builder.fadd)

    return types.float32(types.int64, types.int64, types.int64, types.float32, types.float32, like), generate


GELU_LINE = 2.0 * math.sqrt(2.0 / math.pi)
GELU_CUBE = 0.044715 * GELU_LINE
"""The approximation of GELU by a hyperbolic tangent is x * sigmoid(GELU_LINE * x + GELU_CUBE * x**3)."""


ERROR_SLOPE = 0.5 * math.sqrt(0.5)
ERROR_POLYNOMIAL = (
    0.142201808,
    -0.666104256,
    1.12249766,
    -0.651376541,
    -0.116682482,
    0.0201409035,
    0.0283754937,
    0.387895975,
    0.998492939,
    -1.26544146,
)
"""GELU is half of x times erfc(-x / sqrt(2)). For z >= 0 and t = 1 / (1 + z / 2), erfc(z) is t * exp(-z * z + p(t)). p
was fitted with an error of 5e-8 relative to erfc, so small results are accurate too. ``ERROR_SLOPE * abs(x)`` is z / 2.
"""


Share = Callable[[Lanes, Any], Any]
"""Computes activation(x) / x for each number x of a register."""


def _sigmoid_share(lanes: Lanes, bent: Any) -> Any:
    """sigmoid, computed so that the exponential's argument is never positive, whatever the sign of the gate."""
    b = lanes.builder
    small = lanes.exponential(b.fneg(lanes.magnitude(bent)))
    is_positive = b.fcmp_ordered(">=", bent, floats(0.0))
    return b.fdiv(b.select(is_positive, floats(1.0), small), b.fadd(small, floats(1.0)))


def _gelu_tanh_share(lanes: Lanes, g: Any) -> Any:
    b = lanes.builder
    slope = lanes.multiply_add(b.fmul(g, g), floats(GELU_CUBE), floats(GELU_LINE))
    return _sigmoid_share(lanes, b.fmul(g, slope))


def _gelu_share(lanes: Lanes, g: Any) -> Any:
    b = lanes.builder
    half_z = b.fmul(lanes.magnitude(g), floats(ERROR_SLOPE))
    t = b.fdiv(floats(1.0), b.fadd(half_z, floats(1.0)))
    p = floats(ERROR_POLYNOMIAL[0])
    for coefficient in ERROR_POLYNOMIAL[1:]:
        p = lanes.multiply_add(p, t, floats(coefficient))
    exponent = lanes.multiply_add(b.fmul(half_z, floats(-4.0)), half_z, p)
    below = b.fmul(b.fmul(t, floats(0.5)), lanes.exponential(exponent))
    return b.select(b.fcmp_ordered(">=", g, floats(0.0)), b.fsub(floats(1.0), below), below)


def _activation_row(share: Share, *, is_gated: bool) -> Any:
    """``row(gate, up, output, count, like)``: output = gate * share(gate), times up if it is gated."""

    @intrinsic
    def row(typing_context: Any, gate: Any, up: Any, output: Any, count: Any, like: Any) -> Any:
        """Process one row."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            gate, up, output, count, _ = arguments
            lanes = Lanes(builder)

            def step(offset: Any, state: Any) -> Any:
                g = lanes.load(gate, offset, like)
                product = builder.fmul(g, share(lanes, g))
                if is_gated:
                    product = builder.fmul(product, lanes.load(up, offset, like))
                lanes.store(product, output, offset, like)
                return state

            lanes.fold(count, floats(0.0), step)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4, like), generate

    return row


silu_gate_row = _activation_row(_sigmoid_share, is_gated=True)
gelu_tanh_gate_row = _activation_row(_gelu_tanh_share, is_gated=True)
gelu_tanh_row = _activation_row(_gelu_tanh_share, is_gated=False)
gelu_gate_row = _activation_row(_gelu_share, is_gated=True)
gelu_row = _activation_row(_gelu_share, is_gated=False)


@intrinsic
def clamped_gate_row(
    typing_context: Any, gate: Any, up: Any, output: Any, count: Any, alpha: Any, limit: Any, like: Any
) -> Any:
    """output = g * sigmoid(alpha * g) * (u + 1), with g = min(gate, limit), u = clamp(up, -limit, limit)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        gate, up, output, count, alpha, limit, _ = arguments
        lanes = Lanes(builder)
        alpha, limit, least = lanes.spread(alpha), lanes.spread(limit), lanes.spread(builder.fneg(limit))

        def below(x: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", x, limit), limit, x)

        def step(offset: Any, state: Any) -> Any:
            g, u = below(lanes.load(gate, offset, like)), below(lanes.load(up, offset, like))
            u = builder.select(builder.fcmp_ordered("<", u, least), least, u)
            small = lanes.exponential(builder.fneg(lanes.magnitude(builder.fmul(g, alpha))))
            is_positive = builder.fcmp_ordered(">=", g, floats(0.0))
            share = builder.fdiv(builder.select(is_positive, floats(1.0), small), builder.fadd(small, floats(1.0)))
            product = builder.fmul(builder.fmul(g, share), builder.fadd(u, floats(1.0)))
            lanes.store(product, output, offset, like)
            return state

        lanes.fold(count, floats(0.0), step)
        return context.get_dummy_value()

    number = types.float32
    return types.void(*[types.int64] * 4, number, number, like), generate


@intrinsic
def add_row(typing_context: Any, hidden: Any, delta: Any, count: Any, scale: Any, like: Any) -> Any:
    """hidden += scale * delta."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        hidden, delta, count, scale, _ = arguments
        lanes = Lanes(builder)
        scale = lanes.spread(scale)

        def step(offset: Any, state: Any) -> Any:
            total = lanes.multiply_add(lanes.load(delta, offset, like), scale, lanes.load(hidden, offset, like))
            lanes.store(total, hidden, offset, like)
            return state

        lanes.fold(count, floats(0.0), step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3, types.float32, like), generate


@intrinsic
def convert_row(typing_context: Any, source: Any, target: Any, count: Any, from_like: Any, to_like: Any) -> Any:
    """target = source, rounded to nearest; ``from_like`` and ``to_like`` are numbers of their types."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target, count, *_ = arguments
        lanes = Lanes(builder)

        def step(offset: Any, state: Any) -> Any:
            lanes.store(lanes.load(source, offset, from_like), target, offset, to_like)
            return state

        lanes.fold(count, floats(0.0), step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3, from_like, to_like), generate


@intrinsic
def square_sum(typing_context: Any, numbers: Any, count: Any, like: Any) -> Any:
    """The sum of squares, float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers, count, _ = arguments
        lanes = Lanes(builder)

        def step(offset: Any, total: Any) -> Any:
            loaded = lanes.load(numbers, offset, like)
            return lanes.multiply_add(loaded, loaded, total)

        return lanes.reduce(lanes.fold(count, floats(0.0), step), builder.fadd)

    return types.float32(types.int64, types.int64, like), generate


def _scale_row(*, has_offset: bool) -> Any:
    """``row(source, weight, like, target, target_like, count, scale, more)``: target = source * scale * weight, or *
    (weight + more) with an offset; ``target`` may be ``source``.

    There are two loops, because adding a zero would change results: the compiler may reorder factors, and it orders a
    sum differently from a plain number.
    """

    @intrinsic
    def row(
        typing_context: Any,
        source: Any,
        weight: Any,
        like: Any,
        target: Any,
        target_like: Any,
        count: Any,
        scale: Any,
        more: Any,
    ) -> Any:
        """Process one row."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            source, weight, _, target, _, count, scale, more = arguments
            lanes = Lanes(builder)
            scale, more = lanes.spread(scale), lanes.spread(more)

            def step(offset: Any, state: Any) -> Any:
                scaled = builder.fmul(lanes.load(source, offset, like), scale)
                factor = lanes.load(weight, offset, like)
                if has_offset:
                    factor = builder.fadd(factor, more)
                lanes.store(builder.fmul(scaled, factor), target, offset, target_like)
                return state

            lanes.fold(count, floats(0.0), step)
            return context.get_dummy_value()

        number, address = types.float32, types.int64
        return types.void(address, address, like, address, target_like, types.int64, number, number), generate

    return row


scale_row = _scale_row(has_offset=False)
scale_row_by_sum = _scale_row(has_offset=True)


@intrinsic
def rotate_row(
    typing_context: Any, source: Any, source_like: Any, cosine: Any, sine: Any, target: Any, half: Any, like: Any
) -> Any:
    """Rotate pairs of a head, whose numbers are ``half`` apart; ``target`` may be ``source``. ``like`` is the type of
    everything but the source.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, _, cosine, sine, target, half, _ = arguments
        lanes = Lanes(builder)

        def step(offset: Any, state: Any) -> Any:
            behind = builder.add(offset, half)
            first, second = (lanes.load(source, place, source_like) for place in (offset, behind))
            c, s = lanes.load(cosine, offset, like), lanes.load(sine, offset, like)
            turned = builder.fsub(builder.fmul(first, c), builder.fmul(second, s))
            lanes.store(turned, target, offset, like)
            turned = builder.fadd(builder.fmul(second, c), builder.fmul(first, s))
            lanes.store(turned, target, behind, like)
            return state

        lanes.fold(half, floats(0.0), step)
        return context.get_dummy_value()

    return types.void(types.int64, source_like, *[types.int64] * 4, like), generate
