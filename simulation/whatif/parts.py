"""What all recorded loads have in common: the part that is taken of them, and tokens that go by names."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from simulation.loads import TRACE_BLOCK_TOKENS, Arrival, LoadError
from simulation.step_runner import VOCAB_SIZE

MAX_PAUSE_S = 86_400.0
"""For so long nothing may leave: an idle hour takes seconds, and times of the wall clock are decades behind 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What leaves in ``seconds`` behind ``start_s``, ``speed`` times as fast, lengths divided by ``scale``."""

    start_s: float = 0.0
    seconds: float = math.inf
    speed: float = 1.0
    scale: int = 1

    def check(self) -> None:
        """Raise what is wrong with it.

        Raises:
            LoadError: Something is.
        """
        if not 0.0 < self.speed < math.inf:
            raise LoadError(f"speed must be above 0, got {self.speed}")
        if self.scale < 1 or TRACE_BLOCK_TOKENS % self.scale:
            raise LoadError(f"scale must divide {TRACE_BLOCK_TOKENS}, got {self.scale}")

    def has(self, at_s: float) -> bool:
        """True of what leaves at a time that belongs to it."""
        return 0.0 <= at_s - self.start_s < self.seconds

    def of(self, arrivals: Iterable[Arrival]) -> list[Arrival]:
        """Those of some arrivals, in the order of their times; the first second of the part is their 0.

        Raises:
            LoadError: For longer than ``MAX_PAUSE_S`` nothing leaves.
        """
        found = [
            replace(arrival, at_s=(arrival.at_s - self.start_s) / self.speed)
            for arrival in arrivals
            if self.has(arrival.at_s)
        ]
        found.sort(key=lambda arrival: arrival.at_s)
        times = [0.0, *(arrival.at_s for arrival in found)]
        for before_s, after_s in pairwise(times):
            if after_s - before_s > MAX_PAUSE_S:
                before, after = (self.start_s + at_s * self.speed for at_s in (before_s, after_s))
                raise LoadError(
                    f"no request leaves from second {before:.15g} to second {after:.15g}, which is longer than the "
                    f"{MAX_PAUSE_S:,.0f} s that can be simulated: take a part without it, by --start-s and --seconds"
                )
        return found


def tokens_named(name: str, num_tokens: int) -> npt.NDArray[np.int64]:
    """Tokens that go by the name alone, however many: the shorter of two is how the longer one begins."""
    start = zlib.crc32(name.encode())
    return (start + np.arange(num_tokens, dtype=np.int64) * (2 * (start % 4096) + 1)) % (VOCAB_SIZE - 1) + 1
