"""The batch sizes that decode graphs are captured for."""

from __future__ import annotations

SMALL_SIZES = (1, 2, 4)
STEP = 8
STEPS_PER_DOUBLING = 8
"""From 128 on the step doubles with the size: padding stays below an eighth."""


def ladder_sizes(max_batch_size: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, ... and ``max_batch_size`` itself, growing."""
    sizes = [size for size in SMALL_SIZES if size < max_batch_size]
    size = STEP
    while size < max_batch_size:
        sizes.append(size)
        size += max(STEP, (1 << (size.bit_length() - 1)) // STEPS_PER_DOUBLING)
    return (*sizes, max_batch_size)
