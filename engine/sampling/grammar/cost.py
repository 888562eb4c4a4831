"""What following a grammar costs a row, and when that is too much for the other requests of its steps.

An ambiguous grammar, such as ``s: "a" | s s``, costs more with every token. The library's limits do not catch it, since
it is slow with as few items as a schema with 200 optional properties has. Ordinary grammars take some 0.01 ms of CPU
time a token, so CPU time tells them apart. Time spent waiting for a core does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

FREE_S_PER_TOKEN: Final = 0.002
"""CPU time allowed for each followed token or computed mask: a hundred times the usual cost."""

MAX_OVERRUN_S: Final = 0.5
"""How far a row may exceed its allowance in total. Later tokens that stay below theirs reduce the excess, since a
grammar may be slow now and then.
"""

TOO_LONG: Final = "it takes too long, as it does if a text can be parsed in many ways"


@dataclass(slots=True)
class RowCost:
    """By how much a row's grammar has exceeded its allowance."""

    overrun_s: float = 0.0

    @property
    def is_suspect(self) -> bool:
        """True while it has exceeded its allowance."""
        return self.overrun_s > 0.0

    def charge(self, seconds: float, *, num_tokens: int) -> bool:
        """Add the cost of ``num_tokens`` tokens; False if the total excess is now too high."""
        self.overrun_s = max(self.overrun_s + seconds - FREE_S_PER_TOKEN * num_tokens, 0.0)
        return self.overrun_s <= MAX_OVERRUN_S


@dataclass(frozen=True, slots=True)
class CostClocks:
    """The clocks for costs: ``cpu_s`` is the CPU time of the calling thread, ``wall_s`` is elapsed time."""

    cpu_s: Callable[[], float] = time.thread_time
    wall_s: Callable[[], float] = time.perf_counter
