"""Shared by all recorded loads: choosing a part of a load, and tokens that are derived from names."""

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
"""The longest pause without requests. Idle time costs simulation time (seconds for an hour), and wall-clock times start
decades after 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The requests sent within ``seconds`` after ``start_s``, ``speed`` times as fast, lengths divided by ``scale``."""

    start_s: float = 0.0
    seconds: float = math.inf
    speed: float = 1.0
    scale: int = 1

    def check(self) -> None:
        """Check the values.

        Raises:
            LoadError: A value is wrong.
        """
        if not 0.0 < self.speed < math.inf:
            raise LoadError(f"speed must be above 0, got {self.speed}")
        if self.scale < 1 or TRACE_BLOCK_TOKENS % self.scale:
            raise LoadError(f"scale must divide {TRACE_BLOCK_TOKENS}, got {self.scale}")

    def has(self, at_s: float) -> bool:
        """True when a request that is sent at ``at_s`` belongs to this part."""
        return 0.0 <= at_s - self.start_s < self.seconds

    def of(self, arrivals: Iterable[Arrival]) -> list[Arrival]:
        """Adjust arrivals to this part, in the order of their times. The start of the part becomes time 0.

        Raises:
            LoadError: There is a pause of more than ``MAX_PAUSE_S``.
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
    """Tokens that depend only on the name: for one name, a shorter result is a prefix of a longer one."""
    start = zlib.crc32(name.encode())
    return (start + np.arange(num_tokens, dtype=np.int64) * (2 * (start % 4096) + 1)) % (VOCAB_SIZE - 1) + 1
