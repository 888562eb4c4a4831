"""The source of randomness is the published one, and a pure function of seed and position."""

from __future__ import annotations

import numpy as np
import pytest

from engine.sampling.sampler import philox4x32, uniforms

# From the test vectors of the authors' Random123 library.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = philox4x32(np.array(counter, dtype=np.uint64)[:, None], np.array(key, dtype=np.uint64)[:, None])
    assert tuple(words[:, 0].tolist()) == expected


def test_a_draw_depends_on_its_seed_and_position_alone() -> None:
    seeds = np.array([1, 1, 2, 1 << 63, 1], dtype=np.uint64)
    positions = np.array([5, 6, 5, 5, 5], dtype=np.int32)
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(5)]
    assert together.tolist() == alone
    assert together[0] == together[4]
    assert len(set(together.tolist())) == 4


def test_draws_are_spread_evenly() -> None:
    draws = uniforms(np.full(20_000, 42, dtype=np.uint64), np.arange(20_000, dtype=np.int32))
    counts, _ = np.histogram(draws, bins=50, range=(0.0, 1.0))
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    chi_square = ((counts - 400) ** 2 / 400).sum()
    assert chi_square < 85.4  # the 99.9th percentile for 49 degrees of freedom


def test_draws_of_neighbouring_seeds_are_unrelated() -> None:
    positions = np.arange(5000, dtype=np.int32)
    first, second = (uniforms(np.full(5000, seed, dtype=np.uint64), positions) for seed in (7, 8))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
