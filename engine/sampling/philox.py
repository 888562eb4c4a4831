"""A counter-based source of randomness: the draw for (seed, position) is the same whoever makes it, and when.

Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011 (Philox4x32-10).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

NUM_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)


def philox4x32(counters: UInt64Array, keys: UInt64Array) -> UInt64Array:
    """Encrypt counters: [4, n] 32-bit words under keys [2, n], each in a uint64; returns [4, n] 32-bit words."""
    a, b, c, d = counters
    key_a, key_b = keys
    for _ in range(NUM_ROUNDS):
        product_a = a * _MULTIPLIERS[0]
        product_b = c * _MULTIPLIERS[1]
        a, c = (product_b >> _WORD_BITS) ^ b ^ key_a, (product_a >> _WORD_BITS) ^ d ^ key_b
        b, d = product_b & _LOW_WORD, product_a & _LOW_WORD
        key_a, key_b = (key_a + _KEY_STEPS[0]) & _LOW_WORD, (key_b + _KEY_STEPS[1]) & _LOW_WORD
    return np.stack((a, b, c, d))


def uniforms(seeds: UInt64Array, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each pair of seed and position, with 53 random bits."""
    counters = np.zeros((4, len(seeds)), dtype=np.uint64)
    counters[0] = positions
    keys = np.stack((seeds & _LOW_WORD, seeds >> _WORD_BITS))
    high, low, _, _ = philox4x32(counters, keys)
    bits = (high << np.uint64(21)) | (low >> np.uint64(11))
    result: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return result
