"""Weights in four bits: blocks of numbers that share a power of two.

Source: Open Compute Project, OCP Microscaling Formats (MX) 1.0, 2023.
"""

from __future__ import annotations

from functools import cache

import torch

from engine.layers.experts.spec import MXFP4_BLOCK_SIZE

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK_BYTES = MXFP4_BLOCK_SIZE // 2
_EXPONENT_BIAS = 127
_NO_NUMBER = 255


def dequantize(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is stored as ``blocks`` [..., num_blocks, BLOCK_BYTES] and ``scales`` [..., num_blocks], both uint8.

    Of each byte the lower half comes first.

    Returns:
        [..., num_blocks * MXFP4_BLOCK_SIZE]
    """
    pairs, powers = _tables(blocks.device)
    numbers = pairs[blocks.int()].flatten(-2) * powers[scales.int()].unsqueeze(-1)
    return numbers.flatten(-2).to(dtype)


@cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The two numbers of each byte, [256, 2], and the factor of each scale, [256], in float32."""
    values = [*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)]
    pairs = [(values[byte % 16], values[byte // 16]) for byte in range(256)]
    powers = [2.0 ** (scale - _EXPONENT_BIAS) for scale in range(_NO_NUMBER)] + [float("nan")]
    return torch.tensor(pairs, device=device), torch.tensor(powers, device=device)
